"""What help opens with: examples, and what a command does."""

from __future__ import annotations

OPENINGS = {
    "trueup": """examples:
  trueup demo                                          see the point, on a model that comes with trueup
  trueup calibrate bundled:raw --data bundled:images -o raw.trueup.safetensors

Trues up trained diffusion models: measures how a network misses at every noise level, fits solvers for few
steps to it, and writes both as one small file that trueup.attach puts on the model. `trueup COMMAND --help`
says more.
""",
    "calibrate": """examples:
  trueup calibrate bundled:raw --data bundled:images --images 100 -o raw.trueup.safetensors
  trueup calibrate bundled:raw --data bundled:images --nfe 5,8 -o raw.trueup.safetensors
  trueup calibrate bundled:ema --nfe 8 -o ema.trueup.safetensors                    no data: the solver alone

Measures MODEL on images and writes its calibration; draws a few samples to see what it does to them, and with
--nfe fits a solver to the calibrated model for so many evaluations. Work is kept in a run directory:
interrupted, the same command goes on from there, and with a larger --images it adds to what it has.
""",
    "merge": """examples:
  trueup calibrate bundled:raw --data bundled:images --shard 1/2 -o 1.moments.safetensors
  trueup calibrate bundled:raw --data bundled:images --shard 2/2 -o 2.moments.safetensors
  trueup merge 1.moments.safetensors 2.moments.safetensors -o raw.trueup.safetensors

Makes one calibration of what `trueup calibrate --shard` measured, of one model with the same settings, on any
machine at any time; all shares, unless --partial. The network is not needed, so no samples judge it.
""",
    "check": """examples:
  trueup check bundled:raw --data bundled:images
  trueup check bundled:ema --data bundled:images --images 50 --fail-above 0.01 --quiet

Says how miscalibrated MODEL is, and whether it is being used as it was trained: wrong range, BGR, another
prediction type or schedule are named, with exit code 2. Draws a few samples to see whether correcting it
brings them closer to the data. Writes nothing but what -o asks for. Exits with 1 if --fail-above
is surely exceeded.
""",
    "sample": """examples:
  trueup sample bundled:raw -n 16 --solver dpm-solver-3 --nfe 20 -o before.png
  trueup sample bundled:raw --calibration raw.trueup.safetensors -n 16 --nfe 8 -o after/

Draws samples: a folder of PNGs, a grid if the name ends in .png, arrays if it ends in .npz. Image i of a seed
starts from the same noise whatever else is asked for, so that samples with and without a calibration compare.
If the calibration has a solver fitted for --nfe evaluations, that draws them. Interrupted, the same command
goes on where it was.
""",
    "evaluate": """examples:
  trueup evaluate bundled:raw --calibration raw.trueup.safetensors --data bundled:images --features pixels
  trueup evaluate bundled:ema --calibration ema.trueup.safetensors --data bundled:images --nfe 10,20 -o c.json

Samples MODEL with and without the calibration from the same seeds and compares both with the data: Fréchet
distance and its relatives, precision and recall, colour drift, denoising loss on images the calibration has
not seen; each with an interval, and plain words where the difference is within noise. Most of the time goes
into sampling, twice --samples times --nfe evaluations; --no-loss saves what the denoising loss takes.
""",
    "likelihood": """examples:
  trueup likelihood bundled:raw --data bundled:images --calibration raw.trueup.safetensors
  trueup likelihood bundled:ema --data bundled:images --ode --images 8
  trueup likelihood bundled:ema --data bundled:images --steps 1000 --json -o ema.likelihood.json

Says how likely images are under MODEL, in bits per dimension, less is better; with a calibration also under
the calibrated model, and the difference image by image. --bound: the variational bound, in continuous time or
of a chain of --steps. --ode: by the probability flow. --dsm: the score matching objectives behind the bound.
Images that made the calibration are passed over. With -o, interrupted work goes on where it was (but for
--dsm).
""",
    "samplers": """examples:
  trueup samplers bundled:ema --nfe 5,8,10,20
  trueup samplers bundled:raw --calibration raw.trueup.safetensors --nfe 8 --figure samplers.png

Says how far samples of the usual samplers, on the usual schedules, end from the model's own many-step limit,
from the same noise. No data are needed. A calibration's fitted solvers are among them.
""",
    "inspect": """examples:
  trueup inspect raw.trueup.safetensors
  trueup inspect raw.trueup.safetensors --json
  trueup inspect raw.trueup.safetensors --figure raw.png
""",
    "report": """examples:
  trueup report raw.trueup.safetensors -o report.html
  trueup check bundled:raw --data bundled:images -o check.json
  trueup samplers bundled:raw --calibration raw.trueup.safetensors -o samplers.json
  trueup report raw.trueup.safetensors --with check.json samplers.json -o report.html

Writes what a calibration file says as one page, to be opened in a browser: verdict, samples before and after,
diagnosis, quality against evaluations, the paper's figures, measures, provenance. The page loads nothing and
needs no network. What was measured elsewhere comes by --with; where something is missing, the page says what
makes it.
""",
    "demo": """examples:
  trueup demo
  trueup demo --out /tmp/trueup-demo --seed 1

Calibrates the raw last weights of a small Fashion-MNIST model, samples before and after with the same seeds,
and writes the calibration, one picture (uncalibrated, shift, spectral, the fitted solver in few steps, and
the EMA weights beside them), and a report to open in a browser.
""",
}
