"""The spectral correction of images as one GPU kernel.

A small network on a GPU spends its time on launches, and the correction written with PyTorch's operations
is a dozen of them. Here it is one: each program finds the level of one image and corrects one channel of it,
in single precision; channels beyond the sample's, a learned variance, are left as they are. Imported only
where Triton is installed and the model is on a CUDA device.

What Triton finds out anew at every launch takes longer than the kernel does. `Ready` launches what was
compiled for a call of the same form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import forward_ad

LARGEST = 64  # pixels along an axis: what two images and two matrices of one program may take


def precision(version: str, amd: bool) -> str:
    """How matrices are multiplied.

    Three products in tf32 are as good as one in float32, and are made by the matrix units. AMD's backend has
    none, and Triton before 3.3 aborts the process over them at some sizes, which nothing could catch.
    """
    newer = tuple(int(part) for part in version.split(".")[:2]) >= (3, 3)
    return "tf32x3" if newer and not amd else "ieee"


_PRECISION = precision(triton.__version__, torch.version.hip is not None)


@triton.jit
def _dct(image, left, right, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    rows = tl.dot(left, image, input_precision=PRECISION)
    return tl.dot(rows, tl.trans(right), input_precision=PRECISION)


@triton.jit(do_not_specialize=["times_at", "knots_at"])  # a time or a row may begin anywhere
def _correct(  # type: ignore[no-untyped-def]
    output_at,
    x_at,
    corrected_at,
    times_at,
    knots_at,
    boundaries_at,
    constant_at,
    slopes_at,
    bands_at,
    left_at,
    right_at,
    channels,
    output_stride,
    x_stride,
    times_stride,
    knots_stride,
    nodes,
    bands,
    height,
    width,
    box_height,
    box_width,
    SEARCH: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    PRECISION: tl.constexpr,
):
    image, channel = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i, j = tl.arange(0, H)[:, None], tl.arange(0, W)[None, :]
    inside = (i < height) & (j < width)
    pixel = channel * height * width + i * width + j
    output = tl.load(output_at + image * output_stride + pixel, mask=inside, other=0.0)
    own = (channel + 0 * i) < channels
    x = tl.load(x_at + image * x_stride + pixel, mask=inside & own, other=0.0).to(tl.float32)
    wide = output.to(tl.float32)

    down, across = tl.arange(0, H)[None, :], tl.arange(0, W)[:, None]
    left = tl.load(left_at + i * height + down, mask=(i < box_height) & (down < height), other=0.0)
    right = tl.load(right_at + across * width + j, mask=(across < box_width) & (j < width), other=0.0)

    row = image * knots_stride
    if SEARCH:  # as torch.bucketize: how many boundaries lie below the time
        t = tl.load(times_at + image * times_stride).to(boundaries_at.dtype.element_ty)
        low = tl.full((), 0, tl.int32)
        high = low + nodes - 1
        while low < high:
            middle = (low + high) // 2
            below = tl.load(boundaries_at + middle) < t
            low = tl.where(below, middle + 1, low)
            high = tl.where(below, high, middle)
        row = low.to(tl.int64) * knots_stride
    knot = knots_at + row
    near, far = tl.load(knot + 1), tl.load(knot + 2)  # shares of the level before and of the next
    entry = tl.load(knot).to(tl.int64) * channels + channel
    place, used = i * box_width + j, own & (i < box_height) & (j < box_width)
    size = box_height * box_width
    before = constant_at + entry * size + place
    after = before + channels * size
    constant = near * tl.load(before, mask=used, other=0.0) + far * tl.load(after, mask=used, other=0.0)
    constant = tl.load(knot + 3) * constant
    band = tl.load(bands_at + place, mask=used, other=0)
    before = slopes_at + entry * 2 * bands + band
    after = before + channels * 2 * bands
    a = near * tl.load(before, mask=used, other=0.0) + far * tl.load(after, mask=used, other=0.0)
    d = near * tl.load(before + bands, mask=used, other=0.0) + far * tl.load(
        after + bands, mask=used, other=0.0
    )
    on_output, on_input = a, tl.load(knot + 4) * a + tl.load(knot + 5) * d

    of_output, of_x = _dct(wide, left, right, PRECISION), _dct(x, left, right, PRECISION)
    delta = constant + on_output * of_output + on_input * of_x
    back = _dct(delta, tl.trans(left), tl.trans(right), PRECISION)
    made = corrected_at + image * tl.num_programs(1) * height * width + pixel
    tl.store(made, (wide - back).to(output.dtype), mask=inside)


def fits(output: Tensor, x_t: Tensor) -> bool:
    """Whether the kernel can stand in for the operations: images of a size it holds, and no gradients."""
    return (
        output.ndim == 4
        and max(output.shape[2:]) <= LARGEST
        and output.dtype != torch.float64
        and _images_are_contiguous(output)
        and len(x_t) == len(output)
        and x_t.shape[2:] == output.shape[2:]
        and x_t.device == output.device
        and _images_are_contiguous(x_t)
        and not (torch.is_grad_enabled() and (output.requires_grad or x_t.requires_grad))
        and (torch.compiler.is_compiling() or _is_plain())
    )


def _images_are_contiguous(x: Tensor) -> bool:
    _, _, height, width = x.shape
    return x.stride()[1:] == (height * width, width, 1)


def _is_plain() -> bool:
    return forward_ad._current_level < 0 and not torch._C._are_functorch_transforms_active()


def correct(
    output: Tensor,
    x_t: Tensor,
    t: Tensor | None,
    boundaries: Tensor,
    knots: Tensor,
    constant: Tensor,
    slopes: Tensor,
    bands: Tensor,
    matrices: list[Tensor],
) -> Tensor:
    """The corrected output.

    t (B or 1,): times, with knots (N, 6) of all nodes and the `boundaries` between them; or None, with knots
    (B or 1, 6) of the rows. constant (R, C * box), slopes (R, C * 2 * bands), bands (box): as in the hook.
    """
    known = torch.compiler.is_compiling() or not output.is_cuda
    if not known and output.device.index != torch.cuda.current_device():  # where Triton launches
        with torch.cuda.device(output.device):
            return correct(output, x_t, t, boundaries, knots, constant, slopes, bands, matrices)
    corrected = torch.empty(output.shape, device=output.device, dtype=output.dtype)
    tables = (boundaries, constant, slopes, bands, *matrices)
    _launch(output, x_t, corrected, t, knots, tables)
    return corrected


def _launch(
    output: Tensor,
    x_t: Tensor,
    corrected: Tensor,
    t: Tensor | None,
    knots: Tensor,
    tables: tuple[Tensor, ...],
) -> tuple[Any, list[int], dict[str, Any]]:
    """Through Triton; what it compiled, with the numbers and constants that were handed over."""
    boundaries, _, slopes, _, left, right = tables  # left, right (box, pixels) each
    height, width, channels = left.shape[1], right.shape[1], x_t.shape[1]
    numbers = [
        channels,
        output.stride(0),
        x_t.stride(0),
        0 if t is None or t.numel() == 1 else t.stride(0),
        0 if t is None and len(knots) == 1 else knots.stride(0),
        len(knots),
        slopes.shape[1] // (2 * channels),
        height,
        width,
        left.shape[0],
        right.shape[0],
    ]
    constants = {"SEARCH": t is not None, "H": _tile(height), "W": _tile(width), "PRECISION": _PRECISION}
    warps = 16 if max(height, width) > 32 else 4  # 64 x 64 in 4 would spill: 475 us where 16 take 130
    given = (output, x_t, corrected, boundaries if t is None else t, knots, *tables, *numbers)
    kernel = _correct[(output.shape[0], output.shape[1])](*given, **constants, num_warps=warps)
    return kernel, numbers, constants


def form_of(output: Tensor, x_t: Tensor, t: Tensor | float) -> tuple[Any, ...] | None:
    """What a compiled kernel depends on, besides addresses; None where gradients or the like need operations.

    t: times, or one that the host knows.
    """
    if type(output) is not Tensor or type(x_t) is not Tensor or not _is_plain():
        return None
    if torch.is_grad_enabled() and (output.requires_grad or x_t.requires_grad):
        return None
    told = (t.dtype, t.shape, t.stride()) if isinstance(t, Tensor) else None
    of_x = x_t.dtype, x_t.device, x_t.shape, x_t.stride()
    return output.dtype, output.device, output.shape, output.stride(), of_x, told


class Ready:
    """The kernel as it was compiled for a call, to launch for others of the same form."""

    def __init__(self, run: Callable[..., Any], knots: Tensor, tables: tuple[Tensor, ...], rest: list[Any]):
        self._run, self._kept = run, (knots, tables)  # kept, since addresses keep nothing
        self._fixed = [*(table.data_ptr() for table in tables), *rest]
        self._knots, self._row = knots.data_ptr(), knots.stride(0) * knots.element_size()
        self._device = knots.device.index

    def __call__(self, output: Tensor, x_t: Tensor, t: Tensor | int) -> Tensor | None:
        """The corrected output; None if this call has to go through Triton. t: times, or a node."""
        if _askew(output, x_t) or torch.cuda.current_device() != self._device:
            return None
        corrected = torch.empty_like(output, memory_format=torch.contiguous_format)
        if isinstance(t, int):
            times, knots = 0, self._knots + t * self._row
        else:
            times, knots = t.data_ptr(), self._knots
        addresses = (output.data_ptr(), x_t.data_ptr(), corrected.data_ptr())
        self._run(*addresses, times, knots, *self._fixed)
        return corrected

    @classmethod
    def of(
        cls,
        output: Tensor,
        x_t: Tensor,
        t: Tensor | int,
        boundaries: Tensor,
        knots: Tensor,
        constant: Tensor,
        slopes: Tensor,
        bands: Tensor,
        matrices: list[Tensor],
    ) -> Ready | None:
        """From a call like those to come, with the knots of all nodes; None where that cannot be done here.

        Triton's own calls may change: what is launched directly must give, to the bit, what `correct` gives.
        Comparing waits for the GPU, once a form.
        """
        tables = (boundaries, constant, slopes, bands, *matrices)
        corrected = torch.empty_like(output, memory_format=torch.contiguous_format)
        times, rows = (None, knots[t : t + 1]) if isinstance(t, int) else (t, knots)
        with torch.cuda.device(output.device):
            kernel, numbers, constants = _launch(output, x_t, corrected, times, rows, tables)
            for more in (constants.values(), ()):  # Triton 3.3 and later hand constants over as well
                try:
                    made = cls(
                        kernel[(output.shape[0], output.shape[1], 1)], knots, tables, [*numbers, *more]
                    )
                    found = made(output, x_t, t)
                    if found is not None and _same_bits(found, corrected):
                        return made
                except Exception:  # whatever it is, `correct` does the same
                    continue
        return None


def can_be_readied(output: Tensor, x_t: Tensor) -> bool:
    """Whether calls like this one can be launched directly from now on: not while a graph is captured."""
    return fits(output, x_t) and not _askew(output, x_t) and not torch.cuda.is_current_stream_capturing()


def _askew(output: Tensor, x_t: Tensor) -> bool:
    """Whether one of them begins elsewhere than the kernel was compiled for."""
    return bool((output.data_ptr() | x_t.data_ptr()) & 15)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))  # also where they are not numbers


def _tile(pixels: int) -> int:
    return max(16, 1 << (pixels - 1).bit_length())


def works(device: torch.device, height: int, width: int) -> bool:
    """Whether it can be built and run here: that takes a C compiler, a GPU that Triton knows, and room."""
    if max(height, width) > LARGEST:
        return False
    try:
        image, zero = torch.zeros(1, 1, height, width, device=device), torch.zeros(2, 6, device=device)
        bands = torch.zeros(4, dtype=torch.int32, device=device)
        matrices = [torch.eye(2, size, device=device) for size in (height, width)]
        correct(image, image, zero[0, :1], zero[0, :1], zero, zero[:, :4], zero[:, :2], bands, matrices)
    except Exception:  # whatever it is, the operations do the same
        return False
    return True
