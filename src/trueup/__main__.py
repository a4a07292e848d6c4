"""`python -m trueup`, as launchers of many processes start it."""

from trueup.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
