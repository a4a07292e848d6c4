"""The README's picture of a report: on a desk in the light, and on a phone in the dark.

trueup demo --out out
python benchmarks/report.py out/report.html -o docs/images/report.png   # by chromium and chromium-driver
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from browser import Browser

DESK, PHONE, GAP = (1000, 1160), (390, 1060), 50


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("page", type=Path, metavar="FILE", help="what trueup report wrote")
    p.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    given = p.parse_args()
    browser = Browser()
    try:
        browser.open(given.page, *DESK)
        desk = Image.open(io.BytesIO(browser.picture())).convert("RGB")
        browser.open(given.page, *PHONE, dark=True)
        browser.run("document.getElementById('levels-of').scrollIntoView()")
        phone = Image.open(io.BytesIO(browser.picture())).convert("RGB")
    finally:
        browser.close()
    sheet = Image.new("RGB", (DESK[0] + PHONE[0] + GAP, DESK[1]), desk.getpixel((0, 0)))
    sheet.paste(desk, (0, 0))
    sheet.paste(phone, (DESK[0], (DESK[1] - PHONE[1]) // 2))
    sheet.quantize(128, dither=Image.Dither.NONE).save(given.output, optimize=True)
    print(f"wrote {given.output}, {given.output.stat().st_size // 1024} kB")


if __name__ == "__main__":
    main()
