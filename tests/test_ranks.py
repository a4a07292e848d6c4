"""Many processes are as good as one: real process groups (gloo), and shares that never meet."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.distributed.run import get_args_parser

import trueup
from trueup.density import objectives
from trueup.estimate import Moments, measure
from trueup.estimate.stored import SUMS
from trueup.hf import as_denoiser
from trueup.options import parser
from trueup.page.origin import provenance

from commandline import in_process, refused, trueup_command
from tiny import blobs, save, tiny_unet

HERE = Path(__file__).parent
RECIPES = HERE.parent / "recipes"
USED = 31  # images that count: one more occurs twice, and one is broken
EXACT = 1e-12  # sums are float64, in another order; nothing else differs
ALIKE = ("--trust", "--batch-size", 4, "--device", "cpu", "--skip-bad")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save(tiny_unet(), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = blobs(tmp_path_factory.mktemp("images"), USED)
    shutil.copy(folder / "003.png", folder / "twice.png")
    (folder / "broken.png").write_bytes(b"no picture")
    return folder


def torchrun(ranks, *arguments, restarts=0):
    """What a job of so many ranks does, as `subprocess.run` reports it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return launched(*command, f"--max-restarts={restarts}", *arguments)


def launched(*command, env=None, **more):
    threads = str(torch.get_num_threads())  # as here: with another number bits may differ
    env = {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONIOENCODING": "utf-8", **(env or {})}
    how = {"capture_output": True, "text": True, "env": env, "timeout": 300}
    return subprocess.run(list(map(str, command)), **how, **more)


def jobs(*given):
    """What the ranks of jobs returned, see `ranks_job`."""
    done = launched(sys.executable, HERE / "ranks_job.py", input=json.dumps(given, default=str))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def said(text):
    """What a command said, but for how far it was every half minute."""
    return [line for line in text.splitlines() if not re.search(r"\d (eval|image)/s", line)]


def assert_same(ours, theirs):
    """Moments of the same images, in the same order."""
    assert torch.equal(ours.indices, theirs.indices)
    assert torch.equal(ours.digests, theirs.digests)
    assert ours.data_digest == theirs.data_digest
    assert ours.mean_only == theirs.mean_only
    assert ours.provenance == theirs.provenance
    assert ours.skipped == theirs.skipped
    for name in SUMS:
        one, other = getattr(ours, name), getattr(theirs, name)
        torch.testing.assert_close(one, other, rtol=0, atol=EXACT * float(other.abs().max()), msg=name)


def assert_same_calibration(ours, theirs):
    for name in ("lam", "b", "a", "d"):
        one, other = getattr(ours.correction, name), getattr(theirs.correction, name)
        torch.testing.assert_close(one, other, rtol=EXACT, atol=EXACT * float(other.abs().max()), msg=name)
    for name in ("loss", "gain"):
        one, other = (getattr(cal.evidence, name) for cal in (ours, theirs))
        for part in ("value", "low", "high"):
            torch.testing.assert_close(getattr(one, part), getattr(other, part), rtol=1e-9, atol=1e-12)
    assert ours.evidence.images == theirs.evidence.images
    assert ours.provenance == theirs.provenance
    assert ours.verdict() == theirs.verdict()


# --- under a launcher


@pytest.fixture(scope="module")
def one(model, images, tmp_path_factory):
    out = tmp_path_factory.mktemp("one") / "one.trueup.safetensors"
    done = trueup_command("calibrate", model, "--data", images, "-o", out, "--no-samples", *ALIKE)
    assert done.returncode == 0, done.stderr
    return trueup.load(out), done


def test_ranks_write_what_one_process_writes_and_the_first_alone_speaks(model, images, one, tmp_path):
    out = tmp_path / "x.trueup.safetensors"
    # The recipe for Slurm, with one machine for a cluster.
    for name, does in (("scontrol", "echo localhost"), ("srun", 'exec "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "torchrun").symlink_to(Path(sys.executable).parent / "torchrun")
    slurm = {"JOB_ID": os.getpid(), "JOB_NODELIST": "here", "NNODES": 1, "CPUS_PER_TASK": 2}
    env = {f"SLURM_{name}": str(value) for name, value in slurm.items()}
    env |= {"RANKS_PER_NODE": "2", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    arguments = ("calibrate", model, "--data", images, "-o", out, "--no-samples", *ALIKE)
    done = launched("bash", RECIPES / "slurm.sh", *arguments, env=env)
    assert done.returncode == 0, done.stderr
    cal, alone = one
    assert cal.evidence.images == USED
    assert_same_calibration(trueup.load(out), cal)
    assert done.stdout == alone.stdout
    assert len(said(done.stderr)) == len(said(alone.stderr)), done.stderr
    assert {path.name for path in Path(f"{out}.run").iterdir()} == {
        f"checkpoint{k}.safetensors" for k in ("", "-1")
    }


def test_a_rank_that_is_killed_is_started_again_by_the_launcher_and_ends_in_the_same_file(
    model, images, one, tmp_path
):
    wrapper = tmp_path / "wrapper.py"
    wrapper.write_text(
        f"import os, sys\nsys.path.insert(0, {str(HERE)!r})\n"
        "from trueup.cli import main\nfrom ranks_job import die_after\n"
        "if os.environ['RANK'] == '1' and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    die_after(60)\n"
        "raise SystemExit(main(sys.argv[1:]))\n"
    )
    out = tmp_path / "x.trueup.safetensors"
    arguments = ("calibrate", model, "--data", images, "-o", out, "--no-samples", *ALIKE)
    done = torchrun(2, wrapper, *arguments, restarts=1)
    assert done.returncode == 0, done.stderr
    assert "exitcode: -9" in done.stderr
    assert_same_calibration(trueup.load(out), one[0])
    assert done.stdout == one[1].stdout


LONG = {
    "generated": ("calibrate", "MODEL", "--generated", 14, "--generate-nfe", 4, "-o", "OUT/g.safetensors"),
    "calibrate": ("calibrate", "MODEL", "--data", "IMAGES", "--nfe", 3, "--trajectories", 32),
    "check": ("check", "MODEL", "--data", "IMAGES", "--no-samples", "--json"),
    "sample": ("sample", "MODEL", "-n", 17, "--nfe", 3, "-o", "OUT/drawn"),
    "one-file": (
        "sample",
        "MODEL",
        "-n",
        17,
        "--calibration",
        "OUT/c.safetensors",
        "--nfe",
        3,
        "-o",
        "OUT/x.npz",
    ),
    "samplers": ("samplers", "MODEL", "--nfe", 3, "--trajectories", 9, "--json"),
    "evaluate": (
        "evaluate",
        "MODEL",
        "--calibration",
        "OUT/c.safetensors",
        "--data",
        "IMAGES",
        "--samples",
        17,
    ),
    "bound": (
        "likelihood",
        "MODEL",
        "--data",
        "IMAGES",
        "--calibration",
        "OUT/c.safetensors",
        "-o",
        "OUT/b.json",
    ),
    "flow": ("likelihood", "MODEL", "--data", "IMAGES", "--ode", "--images", 9, "--tolerance", 0.01),
    "losses": ("likelihood", "MODEL", "--data", "IMAGES", "--dsm", "--images", 11),
}
MORE = {
    "calibrate": ("-o", "OUT/c.safetensors", "--batch-size", 8),
    "evaluate": ("--features", "pixels", "--nfe", 3, "-o", "OUT/e.json"),
}


def long_commands(model, images, out):
    """Every command that takes long, with a number of batches that no number of ranks divides."""
    known = {"MODEL": model, "IMAGES": images}
    for name, words in LONG.items():
        trusted = () if name in ("generated", "sample", "one-file", "samplers", "evaluate") else ("--trust",)
        bad = ("--skip-bad",) if "IMAGES" in words else ()
        words = (*words, *trusted, *bad, "--device", "cpu", "--batch-size", 4, *MORE.get(name, ()))
        yield name, [str(known.get(word, word)).replace("OUT", str(out)) for word in words]


@pytest.fixture(scope="module")
def job(model, images, tmp_path_factory):
    """What jobs of forked ranks did: with the library, see `ranks_library`, and with commands."""
    out = tmp_path_factory.mktemp("job")
    torch.manual_seed(1)
    changed = tiny_unet()
    with torch.no_grad():
        next(changed.parameters()).add_(1.0)
    other_model = save(changed, tmp_path_factory.mktemp("other-model"))
    other_images = shutil.copytree(images, out / "other-images")
    # Among the few that ranks compare before they begin: of the others each reads its own.
    pixels = np.asarray(Image.open(images / "000.png")).copy()
    pixels[0, 0] ^= 1
    Image.fromarray(pixels).save(other_images / "000.png")

    def calibrating(name, *more):
        words = ("calibrate", model, "--data", images, "-o", out / name, "--no-samples", *ALIKE, *more)
        return {"out": out, "commands": [(name, list(map(str, words)))]}

    together = {"ranks": 3, "out": out, "library": [model, other_model, images, other_images]}
    together["commands"] = [
        *calibrating("no", "--seed", "RANK")["commands"],
        *long_commands(model, images, out),
    ]
    dice = random.Random(0)
    # The last of the eight batches are left to those who come after; the first rank has the first of these.
    dies = [(3, [dice.randrange(3), dice.randrange(28, 50)])]
    dies += [(ranks, [0, dice.randrange(3, 25)]) for ranks in (2, 4, 1)]
    killed = [{"ranks": ranks, "dies": who, **calibrating("killed")} for ranks, who in dies]
    given = [together, {"ranks": 8, **calibrating("eight")}, *killed, {"ranks": 3, **calibrating("killed")}]
    codes, said = jobs(*given)
    assert [codes[0], codes[1], codes[-1]] == [[0] * 3, [0] * 8, [0] * 3], said
    assert all(signal.SIGKILL in each for each in codes[2:-1]), codes
    return out


def test_killed_at_any_place_a_job_goes_on_with_other_numbers_of_ranks(job, one):
    """Each job but the last lost a rank; whoever came next went on from what all had kept."""
    assert [(job / f"killed.code.{rank}").read_text() for rank in range(3)] == ["0"] * 3
    assert_same_calibration(trueup.load(job / "killed"), one[0])
    assert (job / "killed.out.0").read_text() == one[1].stdout


def test_eight_ranks_write_what_one_process_writes(job, one):
    assert_same_calibration(trueup.load(job / "eight"), one[0])
    assert (job / "eight.out.0").read_text() == one[1].stdout


def test_every_long_command_says_and_writes_what_one_process_does(job, model, images, tmp_path):
    for name, arguments in long_commands(model, images, tmp_path):
        done = trueup_command(*arguments)
        text = [(job / f"{name}.{part}.{rank}").read_text() for part in ("out", "err") for rank in range(3)]
        assert done.returncode == int((job / f"{name}.code.0").read_text()), (name, done.stderr, text)
        assert text[0].replace(str(job), str(tmp_path)) == done.stdout, name
        assert said(text[3].replace(str(job), str(tmp_path))) == said(done.stderr), name
        assert text[1:3] + text[4:] == [""] * 4, name  # others are silent
    made = [path for path in tmp_path.rglob("*") if path.is_file() and ".run" not in str(path)]
    assert len(made) == 6 + 17
    for path in made:
        assert path.read_bytes() == (job / path.relative_to(tmp_path)).read_bytes(), path.name


def test_the_job_for_kubernetes_is_one_that_it_would_take():
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all((RECIPES / "kubernetes.yaml").read_text())
    pod, name = job["spec"]["template"]["spec"], service["metadata"]["name"]
    (container,) = pod["containers"]
    env = {one["name"]: one["value"] for one in container["env"]}
    assert service["spec"]["clusterIP"] == "None"
    assert (job["spec"]["completionMode"], job["spec"]["completions"]) == ("Indexed", int(env["NODES"]))
    assert job["spec"]["parallelism"] == job["spec"]["completions"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(env["RANKS"])
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == name
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    words = [
        word.replace("$(NODES)", env["NODES"]).replace("$(RANKS)", env["RANKS"]) for word in container["args"]
    ]
    known = get_args_parser().parse_args(words)  # torchrun's
    assert (known.nnodes, known.nproc_per_node, known.training_script) == (
        env["NODES"],
        env["RANKS"],
        "trueup",
    )
    assert known.rdzv_endpoint.startswith(f"{job['metadata']['name']}-0.{name}:")  # the first pod's name
    options = parser().parse(known.training_script_args)
    assert (options.command, options.force) == ("calibrate", True)


def test_accelerate_launches_ranks(model, images, one, tmp_path):
    pytest.importorskip("accelerate")
    out = tmp_path / "x.trueup.safetensors"
    # On CPUs too this starts ranks; `--cpu --num_processes 2` starts one process, told that it is alone.
    launch = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", 2, "--num_machines", 1)
    port = ("--main_process_port", 0, "--mixed_precision", "no", "--dynamo_backend", "no")
    arguments = ("calibrate", model, "--data", images, "-o", out, "--no-samples", *ALIKE)
    done = launched(sys.executable, *launch, *port, "-m", "trueup", *arguments)
    assert done.returncode == 0, done.stderr
    assert_same_calibration(trueup.load(out), one[0])
    assert done.stdout == one[1].stdout
    assert Path(f"{out}.run", "checkpoint-1.safetensors").exists()  # there were two


def test_ranks_that_disagree_say_so_once(job):
    errors = [(job / f"no.err.{rank}").read_text() for rank in range(3)]
    assert errors[0].startswith("trueup: rank 1 was given another seed")
    assert errors[1:] == ["", ""]
    assert [(job / f"no.{part}.{rank}").read_text() for part in ("out", "code") for rank in range(3)] == [
        *[""] * 3,
        *["2"] * 3,
    ]
    assert not (job / "no").exists()


def alone(model, images, count, **settings):
    data = trueup.Images(images, count=count, skip_bad=True)
    denoiser = as_denoiser(str(model), device="cpu", batch_size=4)
    return measure(denoiser, data, trust=True, progress=False, **settings)


@pytest.mark.parametrize(
    ("name", "count", "mean_images"),
    [("all", 100, 0), ("few", 9, 7), ("fewer", 2, 0)],  # of three ranks: uneven, and one with nothing
)
def test_every_rank_has_the_moments_of_all(job, model, images, name, count, mean_images):
    found = [Moments.load(job / f"{name}.{rank}") for rank in range(3)]
    expected = alone(model, images, count, mean_images=mean_images)
    assert expected.images == min(count, USED)
    assert_same(found[0], expected)
    for other in found[1:]:
        assert_same(other, found[0])
        assert all(torch.equal(getattr(other, n), getattr(found[0], n)) for n in SUMS)


def test_a_rank_may_measure_alone(job, model, images):
    assert_same(Moments.load(job / "alone"), alone(model, images, 100))
    for rank in range(3):
        assert Moments.load(job / f"own.{rank}").images == 16


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("seed", "rank 1 was given another seed"),
        ("weights", "rank 1 was given another weights"),
        ("images", "rank 2 was given another set of images"),
        ("labels", "rank 1 was given another set of labels"),
        ("broken", "rank 1 was given another choice of images"),
        ("count", "rank 1 was given another choice of images"),
        ("died", "rank 1: "),
    ],
)
def test_what_is_wrong_on_one_rank_is_the_same_error_on_all(job, name, words):
    said = [json.loads((job / f"said.{rank}").read_text())[name] for rank in range(3)]
    assert words in said[0]
    assert said == [said[0]] * 3
    assert "\n" not in said[0]


def test_calibrate_returns_the_same_on_every_rank(job, model, images):
    found = [(job / f"calibration.{rank}").read_bytes() for rank in range(3)]
    assert found == [found[0]] * 3
    data = trueup.Images(images, count=20, skip_bad=True)
    denoiser = as_denoiser(str(model), device="cpu", batch_size=4)
    expected = trueup.calibrate(denoiser, data, seed=3, trust=True, progress=False)
    expected.save(job / "expected")
    ours, expected = trueup.load(job / "calibration.0"), trueup.load(job / "expected")
    assert_same_calibration(ours, expected)
    assert ours.gains == expected.gains


def test_each_rank_reads_its_own_images_to_measure_the_denoising_loss(job, model, images):
    said = [json.loads((job / f"said.{rank}").read_text()) for rank in range(3)]
    denoiser = as_denoiser(str(model), device="cpu", batch_size=4)
    for turn, cal in enumerate((None, trueup.load(job / "calibration.0"))):
        data = trueup.Images(images, count=100, skip_bad=True)
        alone = objectives(denoiser, data, cal, levels=[300, 700], trust=True, progress=False)
        assert [one["losses"][turn] for one in said] == [[alone.before.tolist(), alone.notes]] * 3
    assert "20 images made the calibration and are passed over" in alone.notes
    # One process reads all 33. A rank compares 16 with others, reads 11 or 12, and a few again, since two of
    # the others cannot be used.
    assert all(16 + 8 <= one["reads"] <= 16 + 20 for one in said), [one["reads"] for one in said]


@pytest.mark.parametrize(
    ("env", "command", "words"),
    [
        ({"WORLD_SIZE": "2"}, "calibrate", "RANK is not set"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "calibrate", "MASTER_ADDR is not set"),
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, "calibrate", "no sense"),
        ({"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, "demo", "one process"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "calibrate", "--shard K/N"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "check", "set WORLD_SIZE=1"),
    ],
)
def test_processes_that_cannot_meet_are_refused(env, command, words, monkeypatch, capsys, tmp_path):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    output = ("-o", tmp_path / "x") if command == "calibrate" else ()
    given = () if command == "demo" else ("bundled:raw", "--data", "bundled:images", *output)
    assert words in in_process(capsys, command, *given)


# --- shares without a launcher


def parts_of(model, images, folder, count, *more):
    parts = [folder / f"{k}.moments.safetensors" for k in range(1, count + 1)]
    for k, part in enumerate(parts, 1):
        arguments = ("calibrate", model, "--data", images, "-o", part, "--shard", f"{k}/{count}")
        done = trueup_command(*arguments, *ALIKE, *more)
        assert done.returncode == 0, done.stderr
    return parts


def test_shards_merged_are_what_one_process_writes(model, images, one, tmp_path):
    parts = parts_of(model, images, tmp_path, 3)
    assert [Moments.load(part).images for part in parts] == [12, 11, 8]
    out = tmp_path / "x.trueup.safetensors"
    done = trueup_command("merge", *parts, "-o", out)
    assert done.returncode == 0, done.stderr
    assert "no samples were drawn" in done.stderr
    assert_same_calibration(trueup.load(out), one[0])
    assert done.stdout == one[1].stdout

    refused(trueup_command("merge", parts[0], parts[0], "-o", tmp_path / "y"), "both hold share 1 of 3")
    refused(trueup_command("merge", parts[0], out, "-o", tmp_path / "y"), str(out))
    refused(trueup_command("merge", out, "-o", out), "one of the files to merge: name another")
    refused(trueup_command("merge", *parts, "-o", out), "exists")

    two = ("merge", parts[0], parts[2], "-o", tmp_path / "y")
    refused(trueup_command(*two), "share 2 of 3 is missing", "pass --partial to do without")
    assert not (tmp_path / "y").exists()
    done = trueup_command(*two, "--partial")
    assert done.returncode == 0, done.stderr
    assert "images: 20, all of 33 images; shares 1 and 3 of 3 alone" in done.stdout.splitlines()
    some = trueup.load(tmp_path / "y")
    assert (some.shares.held, some.shares.of) == ((1, 3), 3)
    assert json.loads(trueup_command("inspect", tmp_path / "y", "--json").stdout)["shares"]["held"] == [1, 3]
    assert ("images", "20, all of 33 images; shares 1 and 3 of 3 alone") in provenance(some)


def test_a_share_goes_on_from_its_run_directory(model, images, tmp_path):
    for folder in ("grown", "direct"):
        (tmp_path / folder).mkdir()
    parts_of(model, images, tmp_path / "grown", 2, "--images", 8)
    grown = parts_of(model, images, tmp_path / "grown", 2, "--images", 20, "--force")
    direct = parts_of(model, images, tmp_path / "direct", 2, "--images", 20)
    for ours, theirs in zip(grown, direct, strict=True):
        assert_same(Moments.load(ours), Moments.load(theirs))


def test_shards_of_other_settings_are_not_merged(model, images, tmp_path):
    (tmp_path / "other").mkdir()
    mine = parts_of(model, images, tmp_path, 2)[0]
    other = parts_of(model, images, tmp_path / "other", 2, "--seed", 1)[1]
    refused(trueup_command("merge", mine, other, "-o", tmp_path / "y"), "other settings")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--shard", "4/3"), "K/N"),
        (("--shard", "0/3"), "K/N"),
        (("--shard", "1/2", "--nfe", 8), "leave out --nfe"),
    ],
)
def test_a_shard_that_makes_no_sense_is_refused(more, words, capsys, tmp_path):
    arguments = ("calibrate", "bundled:raw", "--data", "bundled:images", "-o", tmp_path / "x", *more)
    assert words in in_process(capsys, *arguments)


def test_a_share_without_images_is_refused(model, images):
    with pytest.raises(trueup.TrueupError, match="share 3 of 3"):
        alone(model, images, 2, share=(3, 3))
