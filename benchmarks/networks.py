"""Train small networks of other kinds, so that what is found with one is not taken for a rule.

    python benchmarks/networks.py train mnist-ve mnist.npy models/mnist-ve --minutes 1.2
    python benchmarks/networks.py train mnist-cfg mnist.npy models/mnist-cfg --labels mnist_labels.npy
    python benchmarks/networks.py captions fashion.npy captions.npy --labels fashion_labels.npy
    python benchmarks/networks.py train fashion-text fashion.npy models/fashion-text --labels captions.npy

and open them again: `load("models/mnist-ve", device="cuda", batch_size=500)` is a `trueup.Denoiser`. `KINDS`
has their names. All are the U-Net of examples/train.py without dropout, trained on the mean squared error of
what they predict; they differ in noise, prediction, data, labels and averaging.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import itertools
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import UNet2DModel
from torch import Tensor

import trueup
from trueup.process import EDM, VE, DiscreteVP, Flow, NoiseProcess

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from train import build, fit

LEVELS = 100_000  # noise levels of a continuous process that training draws from


@dataclass(frozen=True)
class Kind:
    """A network's noise, prediction and width; classes it is told; whether its weights are averaged."""

    process: NoiseProcess
    prediction: str
    width: int
    classes: int | None = None
    ema: bool = True
    embedding: int | None = None  # width of what it is conditioned on


KINDS = {
    "mnist-ve": Kind(VE(0.01, 50.0), "noise", 32),
    "mnist-cfg": Kind(DiscreteVP.linear(), "noise", 32, classes=10),
    "fashion-cfg": Kind(DiscreteVP.linear(), "noise", 32, classes=10),
    "fashion-text": Kind(DiscreteVP.linear(), "noise", 32, embedding=128),
    "fashion-flow": Kind(Flow(), "flow", 32),
    "fashion-v": Kind(DiscreteVP.cosine(), "velocity", 32, ema=False),
    "cifar-edm": Kind(EDM(sigma_data=0.5), "edm", 64),
    "cifar-x0": Kind(DiscreteVP.linear(), "data", 64),
}


class Network(torch.nn.Module):
    """A U-Net that is shown x_t at unit scale, and times it can tell apart."""

    def __init__(self, unet: UNet2DModel, process: NoiseProcess):
        super().__init__()
        self.unet, self.process = unet, process

    def forward(self, x_t: Tensor, t: Tensor, y: Tensor | None = None) -> Tensor:
        """x_t (B, C, H, W), t (B,) in the process's time, labels y (B,) -> the prediction (B, C, H, W)."""
        if isinstance(self.process, VE):
            x_t, t = x_t / (t**2 + 0.25).sqrt().reshape(-1, 1, 1, 1), t.log()
        elif isinstance(self.process, Flow):
            t = 1000 * t
        return self.unet(x_t, t, class_labels=y).sample


def times(process: NoiseProcess) -> Tensor:
    """The times training draws from, one as likely as the other: (N,), float64.

    Whole timesteps; log sigma uniform (VE) or normal (EDM, wider than published: the ends of a short
    training need it); s uniform (flow).
    """
    if process.integer_times:
        return torch.arange(process.t_max + 1, dtype=torch.float64)
    u = (torch.arange(LEVELS, dtype=torch.float64) + 0.5) / LEVELS
    if isinstance(process, EDM):
        return (0.25 * (-0.8 + 1.6 * torch.special.ndtri(u))).clamp(process.t_min, process.t_max)
    if isinstance(process, VE):
        return process.t_min * (process.t_max / process.t_min) ** u
    return process.t_min + (process.t_max - process.t_min) * u


def as_denoiser(network: Network, name: str, device=None, batch_size: int | None = None) -> trueup.Denoiser:
    kind, unet = KINDS[name], network.unet.config
    return trueup.Denoiser(
        network,
        kind.process,
        kind.prediction,
        shape=(unet.in_channels, unet.sample_size, unet.sample_size),
        conditional=kind.classes is not None or kind.embedding is not None,
        null_label=kind.classes,  # the one after the last
        device=device,
        batch_size=batch_size,
        description=name,
    )


def load(path: str | Path, device="cpu", batch_size: int | None = None) -> trueup.Denoiser:
    """The network that `train` wrote, with its process and prediction."""
    name = json.loads((Path(path) / "kind.json").read_text())["kind"]
    unet = UNet2DModel.from_pretrained(path).float().eval().requires_grad_(False)
    return as_denoiser(Network(unet, KINDS[name].process), name, device, batch_size)


def train(options: argparse.Namespace) -> None:
    kind = KINDS[options.name]
    labelled = kind.classes is not None or kind.embedding is not None
    if labelled != (options.labels is not None):
        raise SystemExit(f"{options.name} is trained {'with' if labelled else 'without'} --labels")
    torch.manual_seed(options.seed)
    device = torch.device(options.device)
    gpu = device.type == "cuda"
    images = torch.from_numpy(np.load(options.data)).permute(0, 3, 1, 2).to(device)
    labels = torch.from_numpy(np.load(options.labels)).to(device) if labelled else None
    embedded: dict = {} if kind.classes is None else {"num_class_embeds": kind.classes + 1}
    if kind.embedding is not None:
        embedded = {"class_embed_type": "identity"}  # of the width of its time embedding
    unet = build(images.shape[2], images.shape[1], kind.width, dropout=0.0, **embedded)
    raw = Network(unet, kind.process).to(device)
    ema = copy.deepcopy(raw)
    prediction = as_denoiser(raw, options.name).parametrization
    all_times = times(kind.process)
    table = torch.stack([all_times, kind.process.alpha(all_times), kind.process.sigma(all_times)])
    table = table.float().to(device)  # (3, N): a CUDA graph cannot fetch them from elsewhere

    def loss() -> Tensor:
        pick = torch.randint(len(images), (options.batch_size,), device=device)
        x0 = images[pick].float() / 127.5 - 1
        eps = torch.randn_like(x0)
        t, alpha, sigma = table[:, torch.randint(table.shape[1], (len(x0),), device=device)]
        alpha, sigma = (v.reshape(-1, 1, 1, 1) for v in (alpha, sigma))  # (B,) -> (B, 1, 1, 1)
        y = None
        if labels is not None:
            y = labels[pick]
            if kind.classes is not None:
                y = y.long().masked_fill(torch.rand(len(x0), device=device) < 0.1, kind.classes)
        with torch.autocast(device.type, torch.bfloat16, enabled=gpu, cache_enabled=False):
            output = raw(alpha * x0 + sigma * eps, t, y)
        return (output.float() - prediction.target(x0, eps, alpha, sigma)).square().mean()

    fit(raw, ema, loss, itertools.count(), options.learning_rate, options.minutes)
    kept = (ema if kind.ema else raw).unet
    kept.half().eval().save_pretrained(options.out, safe_serialization=True)
    (options.out / "kind.json").write_text(json.dumps({"kind": options.name, "minutes": options.minutes}))
    print(f"wrote {options.out}")


NOUNS = [
    ["t-shirt", "top"], ["trousers", "pants"], ["pullover", "sweater"], ["dress", "gown"],
    ["coat", "jacket"], ["sandal", "shoe"], ["shirt", "blouse"], ["sneaker", "trainer"],
    ["bag", "handbag"], ["boot", "ankle-boot"],
]  # fmt: skip
TONES, SIZES = (["dark", "black"], ["grey", "plain"], ["bright", "white"]), ("small", "medium", "large")
FILLERS = ["a", "photo", "picture", "of", "one", "nice", "worn", "new"]


def captions(options: argparse.Namespace) -> None:
    """An embedding per image of a caption that says its class, tone and size in one of several ways.

    A word is a fixed random vector, a caption the mean of its words': an encoder that needs no download.
    """
    images, labels = np.load(options.data), np.load(options.labels)
    rng = np.random.default_rng(options.seed)
    tone, area = (v.reshape(len(images), -1).mean(1) for v in (images / 255.0, images > 20))
    ranks = [np.digitize(v, np.quantile(v, [1 / 3, 2 / 3])) for v in (tone, area)]
    made, seen = np.zeros((len(images), 128), np.float32), set()
    for i, (label, t, s) in enumerate(zip(labels, *ranks, strict=True)):
        words = [*rng.choice(FILLERS, 2), rng.choice(TONES[t]), SIZES[s], rng.choice(NOUNS[label])]
        seen.add(" ".join(words))
        made[i] = sum(word_vector(word) for word in words) / len(words) ** 0.5
    np.save(options.out, made)
    print(f"{len(images)} captions, {len(seen)} different")


def word_vector(word: str) -> np.ndarray:
    seed = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
    return np.random.default_rng(seed).standard_normal(128)


def main() -> None:
    top = p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command = p.add_subparsers(dest="command", required=True)
    words = command.add_parser("captions", help="embeddings of captions")
    p = command.add_parser("train")
    for q in (words, p):
        q.add_argument("--seed", type=int, default=0)
    words.add_argument("data")
    words.add_argument("out", type=Path)
    words.add_argument("--labels", required=True)
    p.add_argument("name", choices=KINDS)
    p.add_argument("data", help=".npy of uint8 images, (N, H, W, C)")
    p.add_argument("out", type=Path)
    p.add_argument(
        "--labels", help=".npy of a class or an embedding per image, for a network that is told them"
    )
    p.add_argument("--minutes", type=float, default=1.2)
    p.add_argument("--batch-size", type=int, default=256)
    p.add_argument("--learning-rate", type=float, default=3e-4)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")

    options = top.parse_args()
    (train if options.command == "train" else captions)(options)


if __name__ == "__main__":
    main()
