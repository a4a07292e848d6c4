"""What reviews found, and must not come back: precision, resumed runs, generators, hidden networks."""

import copy
import itertools
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import trueup
from trueup.bands import Bands, full_precision
from trueup.errors import ArtifactError, DataError, ModelError, TrueupError
from trueup.estimate import Moments, fit, measure
from trueup.images import Images
from trueup.process import ContinuousVP, DiscreteVP

from calibrations import make

SHAPE = (1, 4, 4)
LEVELS = [0.2, 0.6]
QUIET = {"levels": LEVELS, "trust": True, "progress": False}


class Net(torch.nn.Module):
    """The best denoiser of unit normal data, and a little more."""

    def __init__(self, more=0.1):
        super().__init__()
        self.more = torch.nn.Parameter(torch.tensor(more))

    def forward(self, x_t, t, y=None):
        _, sigma = ContinuousVP().scales(t, x_t)
        return sigma * x_t + self.more


def denoiser(network=None, noise=None, **how):
    how = {"data_range": None, "batch_size": 4, **how}
    return trueup.Denoiser(network or Net(), noise or ContinuousVP(), "noise", SHAPE, **how)


def data(count=12):
    return torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def coarse():
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


def test_moments_are_summed_at_full_precision(coarse, monkeypatch):
    seen, dct = [], Bands.dct

    def spy(self, x):
        seen.append(torch.backends.cuda.matmul.fp32_precision)
        return dct(self, x)

    monkeypatch.setattr(Bands, "dct", spy)
    measure(denoiser(), data(4), **QUIET)
    assert set(seen) == {"ieee"}
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_run_on_a_gpu_goes_on_whatever_the_precision(coarse, tmp_path):
    shape = (3, 64, 64)
    x0 = torch.randn(8, *shape)
    net = trueup.Denoiser(Net(), ContinuousVP(), "noise", shape, data_range=None, device="cuda", batch_size=4)
    for count in (4, 8):
        found = measure(net, Images(x0, count=count), run=tmp_path, trust=True, progress=False)
    assert found.images == 8
    exact = measure(net.to("cpu"), x0, trust=True, progress=False)
    assert torch.allclose(found.second, exact.second, rtol=1e-4, atol=1e-4 * float(exact.second.max()))


def test_a_checkpoint_that_would_be_refused_is_not_written(tmp_path, monkeypatch):
    add = Moments.add

    def wrong(self, *args, **how):
        add(self, *args, **how)
        self.second[..., 1, :, :] *= 100  # larger than its factors allow

    monkeypatch.setattr(Moments, "add", wrong)
    with pytest.raises(ArtifactError, match=r"cannot write .*larger than squares allow"):
        measure(denoiser(), data(), run=tmp_path, **QUIET)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize("more", [0, 4])
def test_a_run_is_not_gone_on_with_by_another_call(tmp_path, conditional, more):
    net, labels = Net(), torch.arange(12) % 3 if conditional else None

    def images(count):
        return Images(data(), count=count, labels=labels)

    how = {"conditional": conditional}
    measure(denoiser(net, **how), images(8), run=tmp_path, **QUIET)
    measure(denoiser(net, **how), images(8), run=tmp_path, **QUIET)
    for call in (lambda x, t, y=None: net(x, t / 10, y), lambda x, t, y=None: 0.9 * net(x, t, y)):
        with pytest.raises(ModelError, match="begun with another `call`"):
            measure(denoiser(net, call=call, **how), images(8 + more), run=tmp_path, **QUIET)


def test_a_run_is_not_gone_on_with_other_groups(tmp_path):
    groups = [i // 2 for i in range(12)]
    measure(denoiser(), Images(data(), count=8, groups=groups), run=tmp_path / "a", **QUIET)
    assert measure(denoiser(), Images(data(), groups=groups), run=tmp_path / "a", **QUIET).images == 12
    with pytest.raises(DataError, match="groups back"):
        measure(denoiser(), Images(data(), groups=groups[::-1]), run=tmp_path / "a", **QUIET)
    with pytest.raises(TrueupError, match="begun with another grouping"):
        measure(denoiser(), Images(data()), run=tmp_path / "a", **QUIET)
    measure(denoiser(), Images(data(), count=8), run=tmp_path / "b", **QUIET)
    assert measure(denoiser(), Images(data()), run=tmp_path / "b", **QUIET).images == 12
    with pytest.raises(TrueupError, match="begun with another grouping"):
        measure(denoiser(), Images(data(), groups=groups), run=tmp_path / "b", **QUIET)


@pytest.mark.parametrize(
    "labels", [[0.1 * i for i in range(12)], [[0.1, i] for i in range(12)], [0, 1, 2, 3, 4.5, *range(7)]]
)
def test_labels_in_a_list_are_the_same_when_a_run_goes_on(tmp_path, labels):
    net = denoiser(conditional=True)
    for count in (4, 12):
        found = measure(net, Images(data(), count=count, labels=labels), run=tmp_path, **QUIET)
    assert found.images == 12
    with pytest.raises(DataError, match="not what"):
        measure(net, Images(data(), labels=labels[::-1]), run=tmp_path, **QUIET)


@pytest.mark.parametrize("count", [10, 70])
def test_a_generator_is_looked_at_and_measured_whole(count):
    x0, how = data(count), {"levels": LEVELS, "progress": False}
    found = measure(denoiser(), (row for row in x0), **how)
    assert found.indices.tolist() == list(range(count))
    whole = measure(denoiser(), itertools.chain(x0), **how, trust=True)
    assert torch.equal(found.first, whole.first)
    wrong = denoiser(lambda x, t: -3 * x)
    with pytest.raises(ModelError, match="trust"):
        measure(wrong, (row for row in x0), **how)


def test_networks_that_refuse_fractional_times_take_whole_ones():
    def strict(error):
        def network(x, t):
            if t.is_floating_point() and (t != t.round()).any():
                raise error
            return x * t.reshape(-1, 1, 1, 1) / 1000

        return denoiser(network, DiscreteVP.linear())

    for error in (AssertionError(), ValueError("whole times"), KeyError(3), NotImplementedError()):
        assert strict(error).takes_whole_times_only()
    with pytest.raises(ModelError, match="memory"):
        strict(torch.OutOfMemoryError("out of memory")).takes_whole_times_only()


GLOBAL = Net()


class Holder:
    def __init__(self, net):
        self.net = net

    def __call__(self, x, t):
        return self.net(x, t)

    def method(self, x, t):
        return self.net(x, t)


def hidden():
    net = GLOBAL

    def inner(x, t):
        return net(x, t)

    yield lambda x, t: net(x, t)
    yield lambda x, t: GLOBAL(x, t)
    yield lambda x, t: inner(x, t)
    yield lambda x, t, own=net: own(x, t)
    yield partial(lambda own, x, t: own(x, t), net)
    yield net.forward
    yield Holder(net)
    yield Holder(net).method


@pytest.mark.parametrize("network", hidden())
def test_a_network_is_seen_inside_what_calls_it(network):
    calibration = make(SHAPE, network=GLOBAL)
    assert denoiser(network).fingerprint() == denoiser(GLOBAL).fingerprint() != {}
    bare = denoiser(network)(data(2), 0.5)
    with trueup.attach(GLOBAL, calibration):
        wrapped = denoiser(network)
        assert wrapped.corrected
        with pytest.raises(ModelError, match="a calibration is attached"):
            measure(wrapped, data(), **QUIET)
        with wrapped.bare():
            assert torch.equal(wrapped(data(2), 0.5), bare)
    assert not denoiser(network).corrected


def test_a_denoiser_is_seen_inside_another():
    inner = denoiser(lambda x, t: 0.5 * x)
    outer = denoiser(lambda x, t: inner(x, t))
    with trueup.attach(inner, make(SHAPE, binding=None), force=True):
        assert outer.corrected
    assert not outer.corrected


def test_copies_of_another_batch_size_share_the_correction():
    own = denoiser(lambda x, t: 0.5 * x)
    before, x = own.with_batch_size(2), data(3)
    bare = own(x, 0.5)
    with trueup.attach(own, make(SHAPE, binding=None), force=True):
        within = own.with_batch_size(2)
        corrected = own(x, 0.5)
        assert not torch.equal(corrected, bare)
        assert all(torch.equal(copy(x, 0.5), corrected) for copy in (before, within))
    assert all(torch.equal(copy(x, 0.5), bare) and not copy.corrected for copy in (own, before, within))


@pytest.mark.parametrize("seed", [2**53, -1, "a", 1.5, True, None])
def test_seeds_that_no_file_holds_are_refused_at_once(seed):
    for function in (measure, trueup.calibrate):
        with pytest.raises(TrueupError, match="a seed is a whole number"):
            function(denoiser(), data(), seed=seed, progress=False)
    assert measure(denoiser(), data(4), seed=np.int64(2**53 - 1), **QUIET).images == 4


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda: measure(denoiser(), data(), levels="a"), "levels are times"),
        (lambda: measure(denoiser(), data(), levels=["a"]), "levels are times"),
        (lambda: measure(denoiser(), data(), edges=["a"]), "band edges are"),
        (lambda: denoiser(data_range=(1,)), "data_range is"),
        (lambda: denoiser(data_range="ab"), "data_range is"),
        (lambda: denoiser(data_range=1), "data_range is"),
        (lambda: trueup.Denoiser(Net(), ContinuousVP(), "noise", "ab"), "shape is one sample's"),
        (lambda: trueup.Denoiser(Net(), ContinuousVP(), "noise", (1, 2.5)), "shape is one sample's"),
        (lambda: trueup.Denoiser(Net(), ContinuousVP(), "noise", 8), "shape is one sample's"),
        (lambda: Images(data(), count=True), "count is a whole number"),
        (lambda: Images(data(), offset=True), "offset is a whole number"),
    ],
)
def test_arguments_that_make_no_sense_are_named(function, words):
    with pytest.raises(TrueupError, match=words) as caught:
        function()
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_still_held_at_exit_says_nothing(tmp_path):
    code = f"""
import os, trueup.files as files
kept = files.Folder({str(tmp_path)!r})
os.close(kept._handle)
try:
    files.Folder(None)
except TypeError:
    pass
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_images_that_occur_twice_are_counted(tmp_path):
    x0 = torch.cat([data(6), data(6)[:3]])
    assert measure(denoiser(), x0, mean_images=4, **QUIET).duplicates == 3
    for count, seen in ((4, 0), (None, 3)):
        images = Images(iter(x0), count=count)
        assert measure(denoiser(), images, run=tmp_path, **QUIET).duplicates == seen


def test_full_precision_is_put_back_after_an_error(coarse):
    with pytest.raises(KeyError), full_precision():
        raise KeyError
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


class Overwrites(torch.nn.Module):
    """A network off by a constant, which scales its input in place, and halves its times."""

    def __init__(self, x=0.5, t=1.0):
        super().__init__()
        self.inner, self.x, self.t = Net(0.3), x, t

    def forward(self, x_t, t):
        output = self.inner(x_t, t)
        x_t.mul_(self.x)
        t.mul_(self.t)
        return output


@pytest.mark.parametrize("how", [{"x": 0.5}, {"x": 1.0, "t": 0.5}], ids=["x", "t"])
def test_a_network_that_writes_into_its_arguments_is_corrected_as_any_other(how):
    network, plain = Overwrites(**how), denoiser(Net(0.3))
    own = denoiser(network)
    found, expected = (fit(measure(one, data(40), **QUIET)) for one in (own, plain))
    assert not found.empty
    torch.testing.assert_close(found.correction.b, expected.correction.b)
    x_t = data(4)
    with trueup.attach(own, found), trueup.attach(plain, expected):
        for t in LEVELS:
            torch.testing.assert_close(own(x_t, t), plain(x_t, t))
    assert torch.equal(x_t, data(4))
    with pytest.raises(TrueupError, match=r"writes into its arguments.*attach to that Denoiser"):
        trueup.attach(network, found)


@pytest.mark.parametrize("source", [torch.clone, iter], ids=["data", "stream"])
def test_a_run_of_a_network_that_writes_into_its_arguments_goes_on(tmp_path, source):
    measure(denoiser(Overwrites()), source(data(8)), run=tmp_path, **QUIET)
    more = measure(denoiser(Overwrites()), source(data(12)), run=tmp_path, **QUIET)
    assert more.images == 12
    assert more.provenance["binding"] is None


def test_a_solver_is_for_the_denoiser_it_was_fitted_to_whatever_was_called_before():
    own = denoiser(Overwrites())
    found = trueup.fit_solver(own, nfe=4, trajectories=32, progress=False)
    assert trueup.sample(own, 2, nfe=4, calibration=found, progress=False).isfinite().all()


class Clips(Net):
    """A network that clips its input in place, which shows far out alone."""

    def forward(self, x_t, t):
        output = super().forward(x_t, t)
        x_t.clamp_(-6, 6)
        return output


def test_what_a_network_does_far_out_counts():
    assert denoiser(Net()).binding() is not None
    assert denoiser(Clips()).binding() is None


def test_a_call_may_be_the_first_one_inside_of_vmap():
    own, x_t = denoiser(), data(4)
    mapped = torch.func.vmap(lambda x: own.predict(x[None], 0.2)[0])(x_t)
    torch.testing.assert_close(mapped, own.predict(x_t, 0.2))


def test_a_network_is_not_trained_by_being_looked_at():
    class Normed(Overwrites):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm2d(1)

        def forward(self, x_t, t):
            return super().forward(self.norm(x_t).clone(), t)

    network = Normed().train()
    denoiser(network).binding()
    assert network.training
    assert network.norm.num_batches_tracked == 0


def test_a_corrected_network_is_not_measured_wherever_it_is_hidden():
    network = Net()
    held = SimpleNamespace(net=network)
    own = denoiser(lambda x_t, t: held.net(x_t, t))
    measure(own, data(), **QUIET)
    with (
        trueup.attach(network, make(SHAPE, network=network)),
        pytest.raises(ModelError, match="a calibration is attached"),
    ):
        measure(own, data(), **QUIET)
    assert measure(own, data(), **QUIET).images == 12


def test_what_holds_on_to_a_network_from_afar_is_not_copied():
    held = SimpleNamespace(net=Net())
    with pytest.raises(ModelError, match="holds on to its network"):
        copy.deepcopy(denoiser(lambda x_t, t: held.net(x_t, t)))


def test_the_same_picture_counts_once_in_any_precision():
    images = data(12)
    both = [*images.double(), *images]
    assert measure(denoiser(), both, **QUIET).images == 12


def test_groups_that_changed_are_noticed_in_a_run(tmp_path):
    first = [k // 2 for k in range(40)]
    other = [99 if k in (1, 12) else k // 2 for k in range(40)]  # none of those that are read again
    measure(denoiser(), Images(data(40), groups=first), run=tmp_path, **QUIET)
    with pytest.raises(DataError, match="the groups are not what they were"):
        measure(denoiser(), Images(data(40), groups=other), run=tmp_path, **QUIET)
