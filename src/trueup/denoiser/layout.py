"""How some networks want a sample arranged, beside channels first.

A name is kept with a calibration, so that a correction finds channels and pixels in what a network is given
and what it returns.
"""

from __future__ import annotations

from torch import Tensor

LAYOUTS = ("packed", "frames_first")
SEEN: dict[int, tuple[int, ...]] = {}  # of so many tokens, the size that a corrected network was told last


def arranged(x: Tensor, layout: str | None) -> Tensor:
    """A sample (B, C, *spatial) as a network takes it.

    packed: squares of 2x2 pixels as tokens, (B, H/2 * W/2, C * 4). frames_first: (B, T, C, H, W).

    >>> import torch
    >>> x = torch.randn(2, 4, 6, 8)
    >>> arranged(x, "packed").shape, bool((restored(arranged(x, "packed"), "packed", (6, 8)) == x).all())
    (torch.Size([2, 12, 16]), True)
    """
    if layout == "packed":
        batch, channels, height, width = x.shape
        squares = x.reshape(batch, channels, height // 2, 2, width // 2, 2)
        return squares.permute(0, 2, 4, 1, 3, 5).reshape(batch, height * width // 4, channels * 4)
    return x if layout is None else x.transpose(1, 2)


def restored(x: Tensor, layout: str | None, spatial: tuple[int, ...]) -> Tensor:
    """What `arranged` was given, (B, C, *spatial); spatial is looked at where tokens do not say."""
    if layout == "packed":
        (batch, _, values), (height, width) = x.shape, spatial
        squares = x.reshape(batch, height // 2, width // 2, values // 4, 2, 2)
        return squares.permute(0, 3, 1, 4, 2, 5).reshape(batch, values // 4, height, width)
    return x if layout is None else x.transpose(1, 2)


def spatial_of(x: Tensor, layout: str | None, like: tuple[int, ...]) -> tuple[int, ...] | None:
    """The spatial size of what a network was given; of tokens the one with `like`'s proportions, if any.

    >>> import torch
    >>> [spatial_of(torch.zeros(1, tokens, 16), "packed", (12, 8)) for tokens in (24, 25, 96)]
    [(12, 8), None, (24, 16)]
    """
    if layout != "packed":
        return tuple(x.shape[2:] if layout is None else (x.shape[1], *x.shape[3:]))
    tokens, (height, width) = x.shape[1], like
    rows = round((tokens * height / width) ** 0.5)
    columns = tokens // max(rows, 1)
    same = rows * columns == tokens and rows * width == columns * height
    return (2 * rows, 2 * columns) if same else None


def spatial_of_ids(ids: Tensor) -> tuple[int, int]:
    """Height and width of packed latents, by the places (tokens, 3) that a network is told of them."""
    row, column = ids.reshape(-1, ids.shape[-1])[:, -2:].amax(0).tolist()
    return 2 * int(row) + 2, 2 * int(column) + 2
