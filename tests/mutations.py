"""Structured mutations: what somebody might make of a file's values and tensors, and what may come of it."""

from __future__ import annotations

import copy
import json
import random
import time

import torch

from trueup import files
from trueup.errors import ArtifactError, TrueupError

SCREEN = "\x1b[2J\nverdict: all fine"
DEEP = [[[[[[[[[[1]]]]]]]]]]
VALUES = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 2.5, -0.0, 1e-300, 1e308, -1e308, 10**9, 2**53, 10**19, 10**400),
    *("", "x", "nan", "inf", "0", "noise", "t", SCREEN, "\u202e", "x" * 5000, "../../etc", "9" * 400),
    *([], {}, [0], [1, 2], [0.0] * 4, [None] * 4, ["a"] * 4, DEEP, {"a": DEEP}, {"": 0}, {SCREEN: 1}),
)
NUMBERS = (float("nan"), float("inf"), float("-inf"), 1e38, -1e38, 1e9, 101.0, 1.0, -1.0, 0.0, -0.0, 1e-45)
DTYPES = (torch.float16, torch.float32, torch.float64, torch.int64, torch.bool, torch.uint8, torch.bfloat16)


def check_values(meta):
    """What `load_tensors` makes of metadata that are out of bounds."""
    try:
        files._check_values(meta)
    except ValueError as error:
        raise ArtifactError(files.line(error)) from None


def places(value, found=None):
    """Every container of a JSON value with each of its keys."""
    found = [] if found is None else found
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        found.append((value, key))
        places(value[key], found)
    return found


def change_values(meta: dict, dice: random.Random) -> None:
    """Something in the JSON becomes something else."""
    container, key = dice.choice(places(meta))
    value = container[key]
    way = dice.randrange(6)
    if way == 0:
        del container[key]
    elif way == 1:  # becomes what stands elsewhere
        other, there = dice.choice(places(meta))
        container[key] = copy.deepcopy(other[there])
    elif way == 2 and isinstance(value, (int, float)) and abs(value) < 1e300:
        container[key] = dice.choice(
            (value + 1, -value, value * 1.001, value * 10**6, float(value), str(value))
        )
    elif way == 3 and isinstance(value, list):
        container[key] = dice.choice(
            (value[::-1], value * 2, value[:-1], value * 300, value + [dice.choice(VALUES)])
        )
    elif way == 4 and isinstance(container, dict):
        container[dice.choice(("x", "kind", "name", SCREEN, key.upper()))] = container.pop(key)
    else:
        container[key] = copy.deepcopy(dice.choice(VALUES))


def change_tensors(tensors: dict, dice: random.Random) -> None:
    """A tensor gets other values, another form, another name, or is gone."""
    name = dice.choice(sorted(tensors))
    value = tensors[name].clone()
    way = dice.randrange(9)
    if way == 0:
        tensors.pop(name)
    elif way == 1:
        strange = ("x", "solver.0.x", "solver.1.t", "solver.", "solver", "solver.0", SCREEN)
        strange += ("drawn.0.x", "drawn.1.off", "drawn.", "drawn", "expected")
        strange += ("class.0.x", "class.1.b", "class.2.b", "class.", "class", "class.0", "class.-1.b")
        tensors[dice.choice(strange)] = value
    elif way == 2:
        tensors[name] = tensors[dice.choice(sorted(tensors))].clone()
    elif way == 3:
        tensors[name] = value.to(dice.choice(DTYPES))
    elif way == 4:
        forms = (
            value[..., :-1],
            value[:0],
            value.flatten(),
            value[None],
            torch.cat([value, value]),
            value.movedim(0, -1),
        )
        tensors[name] = dice.choice(forms).contiguous()
    elif way == 5:
        tensors[name] = (value * dice.choice((-1, 0, 2, 1.0001))).to(value.dtype)
    elif way == 6:
        tensors[name] = value.flip(0)
    elif value.numel():
        row = dice.randrange(value.numel())
        if value.is_floating_point():
            one = float(value.view(-1)[row])
            value.view(-1)[row] = dice.choice((*NUMBERS, one + 1e-3, one * 1.0000001, -one))
        else:
            value = value.long()
            value.view(-1)[row] = dice.choice((0, -1, 2**62))
            value = value.to(tensors[name].dtype)
        tensors[name] = value


def mutated(good, dice: random.Random):
    """A few changes, as a reader of the file would see them."""
    meta, tensors = json.loads(good[0]), dict(good[1])
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        if dice.random() < 0.5 and tensors:
            change_tensors(tensors, dice)
        elif meta:
            change_values(meta, dice)
    return meta, tensors


def check_line(error: TrueupError, name: str = "") -> None:
    message = str(error)
    assert name in message
    assert message.isprintable(), message
    assert len(message) < 1500


def quickly(work, *args):
    """What a function returns, within 2 s of this process's own time: a busy machine does not stretch it."""
    start = time.process_time()
    try:
        return work(*args)
    finally:
        assert time.process_time() - start < 2, args
