"""Pictures for a page: PNG in a data URI, small, and pixels that stay pixels."""

from __future__ import annotations

import base64
import io
import math

import torch
from PIL import Image
from torch import Tensor

from trueup.page.markup import Html, tag

ACCENT = (217, 98, 43)
TOP = 0.1  # the share of pixels that stand out


def png(pixels: Tensor) -> str:
    """Bytes (C, H, W), of 1, 3 or 4 channels, as a data URI."""
    made = pixels.to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
    image = Image.fromarray(made[..., 0] if made.shape[2] == 1 else made)
    content = io.BytesIO()
    image.save(content, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"


def picture(pixels: Tensor, alt: str) -> Html:
    """An image of a page."""
    return tag("img", src=png(pixels), alt=alt, width=pixels.shape[2], height=pixels.shape[1])


def around_zero(values: Tensor, largest: float, colour: bool) -> Tensor:
    """A map (C, H, W) as bytes: 0 is grey, largest white, -largest black; channels are colours, or tiles."""
    grey = (127.5 + 127.5 * (values / (largest or 1.0)).clamp(-1, 1)).round().to(torch.uint8)
    return grey if colour or len(grey) == 1 else tiles(grey)


def standing_out(values: Tensor) -> Tensor:
    """The tenth of the pixels with the largest values in any channel; the others can be seen through."""
    size = values.abs().amax(0)  # (H, W)
    count = max(1, round(TOP * size.numel()))
    chosen = torch.zeros(size.numel(), dtype=torch.bool)
    chosen[size.flatten().topk(count).indices] = True
    chosen = chosen.reshape(size.shape) & (size > 0)
    colour = torch.tensor([*ACCENT, 255], dtype=torch.uint8)
    return colour[:, None, None] * chosen.to(torch.uint8)


def tiles(maps: Tensor) -> Tensor:
    """Channels (C, H, W) beside each other, (1, rows H, columns W)."""
    count, height, width = maps.shape
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    sheet = torch.full((rows * columns, height, width), 127, dtype=maps.dtype)
    sheet[:count] = maps
    grid = sheet.reshape(rows, columns, height, width).movedim(2, 1)
    return grid.reshape(1, rows * height, columns * width)
