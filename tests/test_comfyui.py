"""The nodes for ComfyUI, on models with closed forms: what they make of a MODEL is what `attach` makes of it.

ComfyUI itself is not needed: `standin` takes its place. COMFYUI_PATH=... runs the same against a checkout.
"""

import importlib.util
import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import diffusers
import pytest
import torch

import trueup
from trueup import Denoiser, process
from trueup.analytic import GaussianMixture
from trueup.calibration import Correction, OfClass
from trueup.errors import AttachError, DataError, MismatchError, TrueupError
from trueup.hf.autoencoder import Autoencoder
from trueup.parametrization import Parametrization
from trueup.sampling.fitted import follow
from trueup.sampling.network import Network
from trueup.statistics import Number

import standin
from calibrations import emptied, fitted_solver, make

FOLDER = Path(__file__).parent.parent / "integrations" / "comfyui"
SHAPE = (4, 6, 8)
KINDS = {
    "EPS": (process.DiscreteVP.scaled_linear(), Parametrization("noise")),
    "V_PREDICTION": (process.DiscreteVP.scaled_linear(), Parametrization("velocity")),
    "V_PREDICTION_EDM": (process.EDM(1.0, 0.002, 120.0), Parametrization("velocity")),
    "EDM": (process.EDM(0.5, 0.002, 120.0), Parametrization("edm", 0.5)),
    "FLOW": (process.Flow(1000.0), Parametrization("flow")),
    "FLUX": (process.Flow(1.0), Parametrization("flow")),
}
LAM = torch.linspace(3.0, -3.0, 16, dtype=torch.float64)
MIXTURE = GaussianMixture(torch.randn(3, *SHAPE, generator=torch.Generator().manual_seed(7)), std=0.5)


class Net(torch.nn.Module):
    """The ideal network, called as ComfyUI calls its own; prompts add their mean."""

    dtype = torch.float32

    def __init__(self, kind, distortion=None, mixture=MIXTURE):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
        self.ideal = mixture.denoiser(*KINDS[kind], distortion).network

    def forward(self, x, t, context=None, control=None, transformer_options=None, **kwargs):
        output = self.ideal(x, t)
        return output if context is None else output + context.mean((1, 2)).reshape(-1, 1, 1, 1)


@pytest.fixture(scope="module")
def comfy(tmp_path_factory):
    """ComfyUI, or what stands in for it."""
    return standin.modules(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def nodes(comfy):
    """The package, loaded as ComfyUI loads it: from its folder, under a name that is a path."""
    name = str(FOLDER).replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, FOLDER / "__init__.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert set(module.NODE_DISPLAY_NAME_MAPPINGS) == set(module.NODE_CLASS_MAPPINGS)
    return SimpleNamespace(**module.NODE_CLASS_MAPPINGS)


def calibration(kind, network=None, shape=SHAPE, **changes):
    noise, prediction = KINDS[kind]
    made = make(shape, noise, noise.t_of_lam(LAM), prediction.name, network=network, **changes)
    made.provenance["parametrization"] = prediction.settings()
    return made


def model(comfy, kind, network=None, latent_format=None, **sampling_settings):
    config = SimpleNamespace(
        unet_config={"disable_unet_model_creation": True},
        latent_format=latent_format or comfy.latent_formats.SD15(),
        sampling_settings=({"sigma_data": 0.5} if kind == "EDM" else {}) | sampling_settings,
        manual_cast_dtype=None,
        memory_usage_factor=1.0,
    )
    made = comfy.model_base.BaseModel(config, getattr(comfy.model_base.ModelType, kind), device="cpu")
    made.diffusion_model = Net(kind) if network is None else network
    device = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(made, load_device=device, offload_device=device)


def run(comfy, patcher, sampler, sigmas, noise, cfg=1.0, latent=None):
    """A sample in the network's own latents, guided away from one prompt and to another."""
    guider = comfy.samplers.CFGGuider(patcher)
    guider.set_conds([[torch.full((1, 2, 3), 0.2), {}]], [[torch.full((1, 2, 3), -0.1), {}]])
    guider.set_cfg(cfg)
    latent = torch.zeros_like(noise) if latent is None else latent
    made = guider.sample(noise, latent, sampler, sigmas, seed=0)
    return patcher.get_model_object("latent_format").process_in(made)


def denoised(comfy, patcher, x, sigma, cfg=1.0):
    """What a sampler is told of states x, each at its own sigma."""
    seen = []

    def look(net, noise, sigmas, extra_args=None, callback=None, disable=None):
        seen.append(net(x, sigma, **extra_args))
        return noise

    run(comfy, patcher, comfy.samplers.KSAMPLER(look), torch.tensor([0.9, 0.0]), torch.zeros_like(x), cfg)
    return seen[0]


def states(kind, lam):
    """Sigmas as ComfyUI has them, and states of that noise."""
    lam = torch.tensor(lam, dtype=torch.float64)
    flow = kind in ("FLOW", "FLUX")
    sigma = (torch.sigmoid(-lam) if flow else (-lam).exp()).float()
    signal = 1 - sigma if flow else torch.ones_like(sigma)
    x0, eps = torch.randn(2, len(lam), *SHAPE, generator=torch.Generator().manual_seed(3))
    wide = (-1, 1, 1, 1)
    return signal.reshape(wide) * x0 + sigma.reshape(wide) * eps, sigma


def assert_same(found, expected, rounding=1e-5):
    """Row by row, as float32 has it: a denoised state at sigma is a difference of states of that size."""
    scale = expected.flatten(1).abs().amax(1).clamp_min(1.0).reshape(-1, 1, 1, 1)
    assert ((found - expected) / scale).abs().max() < rounding


ROWS = (2.3, 0.41, -0.77, -1.9, -2.6)


@pytest.mark.parametrize("cfg", [1.0, 3.5])
@pytest.mark.parametrize("kind", KINDS)
def test_the_node_is_the_attached_network(comfy, nodes, kind, cfg):
    patcher = model(comfy, kind)
    network = patcher.model.diffusion_model
    cal = calibration(kind, network)
    x, sigma = states(kind, ROWS)
    before = denoised(comfy, patcher, x, sigma, cfg)
    with trueup.attach(network, cal):
        expected = denoised(comfy, patcher, x, sigma, cfg)
    (made,) = nodes.TrueupCalibrate().calibrate(patcher, cal)
    found = denoised(comfy, made, x, sigma, cfg)
    assert_same(found, expected, 2e-5)
    assert (found - before).flatten(1).abs().amax(1).min() > 1e-2  # every row is corrected
    assert torch.equal(denoised(comfy, patcher, x, sigma, cfg), before)  # and what came in is as it was


@pytest.mark.parametrize("kind", ["EPS", "V_PREDICTION", "FLOW"])
def test_a_known_bias_is_gone(comfy, nodes, kind):
    """A network that adds a constant to its eps, and the correction that says so: the ideal one remains."""
    bias = torch.randn(*SHAPE, generator=torch.Generator().manual_seed(5))
    patcher = model(comfy, kind, Net(kind, lambda eps, u, lam: bias.to(eps)))
    cal = calibration(kind)
    bands = cal.correction.bands
    b = bands.dct(bias.double()).flatten(1).expand(len(LAM), -1, -1)
    cal.correction = Correction(cal.correction.lam, b, *(torch.zeros_like(cal.correction.a),) * 2, bands)
    x, sigma = states(kind, ROWS)
    (made,) = nodes.TrueupCalibrate().calibrate(patcher, cal)
    ideal = denoised(comfy, model(comfy, kind), x, sigma)
    off, left = ((denoised(comfy, one, x, sigma) - ideal).flatten(1).abs().amax(1) for one in (patcher, made))
    assert (off > 0.1).all()
    assert (left < 5e-4 * off).all()  # half of what lies between two of the times that are tabulated


def test_gains_are_those_of_attach(comfy, nodes):
    patcher = model(comfy, "EPS")
    network = patcher.model.diffusion_model
    cal = calibration("EPS", network)
    x, sigma = states("EPS", ROWS)
    found = {}
    for gains in nodes.TrueupCalibrate.INPUT_TYPES()["optional"]["gains"][0]:
        (made,) = nodes.TrueupCalibrate().calibrate(patcher, cal, gains)
        found[gains] = denoised(comfy, made, x, sigma)
        with trueup.attach(network, cal, gains=None if gains == "auto" else gains):
            assert_same(found[gains], denoised(comfy, patcher, x, sigma), 2e-5)
    assert set(found) == {"auto", "sqrt", "response", "least-squares"}
    assert torch.equal(found["auto"], found["sqrt"])
    assert not torch.allclose(found["sqrt"], found["least-squares"])


def test_nothing_to_correct_changes_not_one_bit(comfy, nodes):
    patcher = model(comfy, "EPS")
    (made,) = nodes.TrueupCalibrate().calibrate(patcher, emptied(calibration("EPS")))
    x, sigma = states("EPS", ROWS)
    assert torch.equal(denoised(comfy, made, x, sigma), denoised(comfy, patcher, x, sigma))


def test_clones_of_the_corrected_model_are_corrected(comfy, nodes):
    patcher = model(comfy, "EPS")
    (made,) = nodes.TrueupCalibrate().calibrate(patcher, calibration("EPS"))
    assert "model_function_wrapper" not in patcher.model_options
    assert made.model is patcher.model
    later = made.clone()
    assert later.model_options["model_function_wrapper"] is made.model_options["model_function_wrapper"]
    x, sigma = states("EPS", ROWS)
    assert torch.equal(denoised(comfy, later, x, sigma), denoised(comfy, made, x, sigma))


def test_other_wrappers_go_on_as_if_around_the_attached_network(comfy, nodes):
    def other(apply_model, call):  # one that changes what the network is asked, and what it says
        return apply_model(0.9 * call["input"], 1.1 * call["timestep"], **call["c"]) + 0.25

    plain = model(comfy, "EPS")
    network = plain.model.diffusion_model
    cal = calibration("EPS", network)
    x, sigma = states("EPS", ROWS)
    wrapped = plain.clone()
    wrapped.set_model_unet_function_wrapper(other)
    with trueup.attach(network, cal):
        expected = denoised(comfy, wrapped, x, sigma, 2.0)
    (made,) = nodes.TrueupCalibrate().calibrate(wrapped, cal)
    assert_same(denoised(comfy, made, x, sigma, 2.0), expected, 2e-5)
    (first,) = nodes.TrueupCalibrate().calibrate(plain, cal)
    ours, after = first.model_options["model_function_wrapper"], first.clone()
    after.set_model_unet_function_wrapper(
        lambda apply_model, call: (
            ours(apply_model, {**call, "input": 0.9 * call["input"], "timestep": 1.1 * call["timestep"]})
            + 0.25
        )
    )
    assert_same(denoised(comfy, after, x, sigma, 2.0), expected, 2e-5)


@pytest.mark.parametrize("kind", ["EPS", "FLOW"])
def test_the_ends_of_the_noise_are_finite(comfy, nodes, kind):
    """A flow begins with noise alone; and some samplers ask at no noise at all."""
    patcher = model(comfy, kind)
    network = patcher.model.diffusion_model
    cal = calibration(kind, network)
    (made,) = nodes.TrueupCalibrate().calibrate(patcher, cal)
    top = patcher.get_model_object("model_sampling").sigma_max
    x, sigma = torch.randn(2, *SHAPE), torch.stack([top, top])
    found = denoised(comfy, made, x, sigma)
    with trueup.attach(network, cal):
        assert_same(found, denoised(comfy, patcher, x, sigma), 2e-5)
    level = made.model_options["model_function_wrapper"]
    none = level(lambda x, t: x, {"input": x, "timestep": torch.zeros(2), "c": {}})
    assert torch.allclose(none, x, atol=1e-4)


def test_a_correction_by_class_is_that_of_all(comfy, nodes, caplog):
    patcher = model(comfy, "EPS")
    cal = calibration("EPS")
    x, sigma = states("EPS", ROWS)
    (all_rows,) = nodes.TrueupCalibrate().calibrate(patcher, cal)
    own = OfClass(3, 20, Number.of(1.0, 0.1, 16), calibration("EPS", seed=1).correction)
    with caplog.at_level(logging.WARNING, "trueup"):
        (made,) = nodes.TrueupCalibrate().calibrate(patcher, replace(cal, classes=(own,)))
    assert torch.equal(denoised(comfy, made, x, sigma), denoised(comfy, all_rows, x, sigma))
    assert "of all" in caplog.text
    assert "Réseau" in caplog.text  # whose weights nobody compared


def test_what_does_not_belong_is_refused(comfy, nodes):
    node, eps = nodes.TrueupCalibrate(), calibration("EPS")
    with pytest.raises(MismatchError, match="latents of 3 channels, and this MODEL has 4"):
        node.calibrate(model(comfy, "EPS"), calibration("EPS", shape=(3, 6, 8)))
    with pytest.raises(MismatchError, match=r"another noise process \(discrete_vp\) than that of this MODEL"):
        node.calibrate(model(comfy, "FLOW"), eps)
    with pytest.raises(MismatchError, match="another noise process"):
        node.calibrate(model(comfy, "EPS", linear_end=0.02), eps)
    with pytest.raises(MismatchError, match="of a noise prediction, which is not that of this MODEL"):
        node.calibrate(model(comfy, "V_PREDICTION"), eps)
    with pytest.raises(MismatchError, match=r"another noise process \(flow\)"):
        node.calibrate(model(comfy, "EPS"), calibration("FLOW"))
    with pytest.raises(MismatchError, match="another noise process"):
        node.calibrate(model(comfy, "EPS", zsnr=True), eps)
    distilled = model(comfy, "EPS")
    sampling = distilled.get_model_object("model_sampling")
    exact = sampling.calculate_denoised
    sampling.calculate_denoised = lambda sigma, output, x: 0.9 * exact(sigma, output, x) + 0.1 * x
    with pytest.raises(MismatchError, match="which is not that of this MODEL"):
        node.calibrate(distilled, eps)
    with pytest.raises(AttachError, match="already on this MODEL"):
        node.calibrate(*node.calibrate(model(comfy, "EPS"), eps), eps)


def test_a_terminal_snr_of_zero(comfy, nodes):
    """The schedule as diffusers has it and as ComfyUI has it; both put some signal where there is none."""
    scheduler = diffusers.DDIMScheduler(
        beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, rescale_betas_zero_snr=True
    )
    noise = process.DiscreteVP(scheduler.alphas_cumprod)
    patcher = model(comfy, "V_PREDICTION", zsnr=True)
    network = patcher.model.diffusion_model
    cal = make(SHAPE, noise, noise.t_of_lam(LAM), "velocity", network=network)
    x, sigma = states("V_PREDICTION", ROWS)
    (made,) = nodes.TrueupCalibrate().calibrate(patcher, cal)
    found = denoised(comfy, made, x, sigma)
    with trueup.attach(network, cal):
        assert_same(found, denoised(comfy, patcher, x, sigma), 2e-5)


def test_a_shift_of_a_flow_is_no_other_noise(comfy, nodes):
    """It moves levels, and what noise there is at a level stays; so does the sign of what a network says."""
    patcher = model(comfy, "FLOW", shift=3.0)
    cal = calibration("FLOW", patcher.model.diffusion_model)
    x, sigma = states("FLOW", ROWS)
    (made,) = nodes.TrueupCalibrate().calibrate(patcher, cal)
    found = denoised(comfy, made, x, sigma)
    with trueup.attach(patcher.model.diffusion_model, cal):
        assert_same(found, denoised(comfy, patcher, x, sigma), 2e-5)
    cal.provenance["parametrization"] = Parametrization("reversed_flow").settings()
    (turned,) = nodes.TrueupCalibrate().calibrate(patcher, cal)
    assert_same(denoised(comfy, turned, x, sigma), found, 2e-5)


def test_other_sizes_are_corrected_as_a_resized_calibration_does(comfy, nodes):
    cal, (x, sigma) = calibration("EPS", shape=(4, 8, 8)), states("EPS", ROWS)
    (made,) = nodes.TrueupCalibrate().calibrate(model(comfy, "EPS"), cal)
    (resized,) = nodes.TrueupCalibrate().calibrate(model(comfy, "EPS"), cal.resized((6, 8)))
    found = denoised(comfy, made, x, sigma)
    torch.testing.assert_close(found, denoised(comfy, resized, x, sigma))
    assert not torch.allclose(found, denoised(comfy, model(comfy, "EPS"), x, sigma))


def test_files_are_found_by_name_and_by_path(comfy, nodes, tmp_path):
    folder = Path(comfy.folder_paths.models_dir) / "trueup"
    folder.mkdir()
    calibration("EPS").save(folder / "mine.trueup.safetensors")
    (folder / "notes.txt").write_text("not one")
    node = nodes.TrueupLoadCalibration
    names = node.INPUT_TYPES()["required"]["name"][0]
    assert names == ["mine.trueup.safetensors", names[-1]]
    loaded, summary = node().load(names[0])
    assert loaded.identity == calibration("EPS").identity
    assert "verdict" in summary
    other = tmp_path / "other.safetensors"
    calibration("FLOW").save(other)
    first = node.IS_CHANGED(names[-1], str(other))
    assert node().load(names[-1], f" {other} ")[0].process.kind == "flow"
    calibration("EPS").save(other)
    assert node.IS_CHANGED(names[-1], str(other)) != first
    with pytest.raises(DataError, match="choose a file of models/trueup, or give the path of one"):
        node().load(names[-1])
    with pytest.raises(TrueupError, match="gone"):
        node().load("gone.trueup.safetensors")


def test_all_of_it_in_inference_mode(comfy, nodes, tmp_path):
    """Which is how ComfyUI runs its nodes."""
    patcher = model(comfy, "EPS")
    cal = with_solver("EPS", patcher.model.diffusion_model)
    cal.save(tmp_path / "mine.safetensors")
    noise = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(2))

    def sampled():
        name = nodes.TrueupLoadCalibration.INPUT_TYPES()["required"]["name"][0][-1]
        loaded, _ = nodes.TrueupLoadCalibration().load(name, str(tmp_path / "mine.safetensors"))
        (made,) = nodes.TrueupCalibrate().calibrate(patcher, loaded)
        sigmas, sampler = nodes.TrueupFittedSteps().steps(made, loaded, 3, 1.0)
        return run(comfy, made, sampler, sigmas, noise.clone())

    with torch.inference_mode():
        found = sampled()
    assert torch.equal(found, sampled())


def with_solver(kind, network, gains="sqrt", guidance=1.0, **changes):
    """A calibration and three random steps fitted to it; of the network's answers, mild ones."""
    cal, noise = calibration(kind, network), KINDS[kind][0]
    kept = torch.ones(cal.correction.bands.count, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    solver = fitted_solver(SHAPE, noise, kept, generator, None, 3, guidance, gains=gains)
    solver.tables.mul_(0.1)
    for name, value in changes.items():
        setattr(solver, name, value)
    return replace(cal, solvers=(solver,))


@pytest.mark.parametrize("history", ["eps", "x0"])
@pytest.mark.parametrize("kind", ["EPS", "V_PREDICTION", "FLOW", "FLUX"])
def test_the_fitted_steps_are_those_of_trueup(comfy, nodes, kind, history):
    patcher = model(comfy, kind)
    network = patcher.model.diffusion_model
    cal = with_solver(kind, network, history=history)
    (made,) = nodes.TrueupCalibrate().calibrate(patcher, cal)
    sigmas, sampler = nodes.TrueupFittedSteps().steps(made, cal, 3, 1.0)
    assert sigmas.dtype == torch.float32
    assert len(sigmas) == 4
    noise = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(2))
    found = run(comfy, made, sampler, sigmas, noise.clone())
    prompt = torch.full((2, 2, 3), 0.2)
    denoiser = Denoiser(network, *KINDS[kind], SHAPE, call=lambda x, t: network(x, t, prompt))
    with trueup.attach(denoiser, cal, force=True):
        expected = follow(cal.solvers[0], Network(denoiser), noise)
    assert_same(found, expected, 1e-4)


def test_some_of_the_fitted_steps_in_a_row(comfy, nodes, caplog):
    """Split where the next step remembers nothing, two halves are the whole."""
    patcher = model(comfy, "EPS")
    cal = with_solver("EPS", None, "none", 2.0)
    (solver,) = cal.solvers
    solver.weights[:, 2:], solver.tables[:, 2:] = 0.0, 0.0
    sigmas, sampler = nodes.TrueupFittedSteps().steps(patcher, cal, 3, 2.0)
    noise = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(2))
    whole = run(comfy, patcher, sampler, sigmas, noise.clone(), 2.0)
    assert not caplog.records  # the guidance is that of the fit
    scale = patcher.get_model_object("latent_format")
    middle = scale.process_out(run(comfy, patcher, sampler, sigmas[:2], noise.clone(), 2.0))
    with caplog.at_level(logging.WARNING, "trueup"):
        halves = run(comfy, patcher, sampler, sigmas[1:], torch.zeros_like(noise), 2.0, middle)
        assert not caplog.records
        run(comfy, patcher, sampler, sigmas, noise.clone(), 3.0)
    assert "fitted for cfg 2, and run with 3" in caplog.text
    assert_same(halves, whole, 1e-4)


def test_steps_that_were_not_fitted_are_refused(comfy, nodes):
    patcher, cal, node = model(comfy, "EPS"), with_solver("EPS", None), nodes.TrueupFittedSteps()
    with pytest.raises(MismatchError, match="fitted to the network as it is corrected"):
        node.steps(patcher, cal, 3, 1.0)
    (made,) = nodes.TrueupCalibrate().calibrate(patcher, cal, "response")
    with pytest.raises(
        MismatchError, match="fitted with sqrt gains, and the MODEL is corrected with response"
    ):
        node.steps(made, cal, 3, 1.0)
    (made,) = nodes.TrueupCalibrate().calibrate(patcher, cal)
    with pytest.raises(MismatchError, match="no solver for 4 evaluations"):
        node.steps(made, cal, 4, 1.0)
    sigmas, sampler = node.steps(made, cal, 3, 1.0)
    noise = torch.zeros(1, *SHAPE)
    for others in (sigmas * 0.9, sigmas[[0, 2, 3]], sigmas[:1]):
        with pytest.raises(MismatchError, match="steps from one of its own levels to the next"):
            sampler.sampler_function(None, noise, others)


@pytest.mark.parametrize(
    ("name", "config"), [("SD15", {}), ("Flux", {"scaling_factor": 0.3611, "shift_factor": 0.1159})]
)
def test_latents_are_those_of_diffusers(comfy, name, config):
    """What a calibration is made of is what ComfyUI's samplers see: no factor lies between them."""
    vae = diffusers.AutoencoderKL(
        block_out_channels=(4,), norm_num_groups=2, latent_channels=4, sample_size=8, **config
    )  # which by default is scaled as Stable Diffusion's is
    pictures = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    plain = vae.encode(pictures).latent_dist.mode().detach()
    expected = getattr(comfy.latent_formats, name)().process_in(plain)
    assert torch.allclose(Autoencoder(vae).encode(pictures), expected, atol=1e-6)


def test_the_workflow_uses_the_nodes_as_they_are(nodes):
    """Every input of ours is given, known, and connected to an output of its kind."""
    flow = json.loads((FOLDER / "workflow_api.json").read_text())
    ours = {n: node for n, node in flow.items() if node["class_type"].startswith("Trueup")}
    assert {node["class_type"] for node in ours.values()} == set(vars(nodes))
    for node in ours.values():
        kinds = getattr(nodes, node["class_type"]).INPUT_TYPES()
        known = {**kinds["required"], **kinds.get("optional", {})}
        assert kinds["required"].keys() <= node["inputs"].keys() <= known.keys()
        for name, value in node["inputs"].items():
            if isinstance(value, list) and flow[value[0]]["class_type"].startswith("Trueup"):
                outputs = getattr(nodes, flow[value[0]]["class_type"]).RETURN_TYPES
                assert outputs[value[1]] == known[name][0]
