"""LoRA equals PEFT: logits of imported and exported adapters, and a step of AdamW on the adapters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import compiled

import jaxgpt
from jaxgpt.config import Config, LoraConfig, OptimConfig
from jaxgpt.convert.import_model import import_model
from jaxgpt.convert.open_model import open_model
from jaxgpt.convert.peft.adapters import export_adapter, import_adapter
from jaxgpt.convert.peft.config import KEEPS_BASE, read_config
from jaxgpt.convert.peft.lora_targets import resolve_targets
from jaxgpt.convert.peft.read_adapter import read_adapter
from jaxgpt.errors import UserError
from jaxgpt.lm.model import load_adapters
from jaxgpt.model.lora import abstract_trained, merge
from jaxgpt.model.params import flatten_params

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from parity.families import CASES, V  # noqa: E402

# A separate matrix, GPT-2's fused matrix, NeoX's matrix fused head by head, and all matrices of a model.
TARGETS = {
    "llama": ["q_proj", "o_proj", "down_proj"],
    "gpt2": ["c_attn", "mlp.c_proj"],
    "gpt_neox": ["query_key_value"],
    "qwen3": "all-linear",
}
RATE = 1e-2
ALPHA = 12
RANK = 3


@pytest.fixture(params=TARGETS)
def adapted(request, tmp_path):
    """Return a PEFT model with random adapters, and a jaxgpt run with the same adapters."""
    case = request.param
    CASES[case].build().save_pretrained(tmp_path / "hf")
    import_model(tmp_path / "hf", tmp_path / "base", "ids")
    model = CASES[case].build()
    config = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=TARGETS[case], task_type="CAUSAL_LM", fan_in_fan_out=case == "gpt2"
    )
    theirs = peft.get_peft_model(model, config).eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    theirs.save_pretrained(tmp_path / "adapter")
    import_adapter(tmp_path / "adapter", tmp_path / "run", str(tmp_path / "base"))
    return case, theirs, tmp_path


def logits(config, params, ids):
    with jax.default_matmul_precision("highest"):
        return np.asarray(compiled(jaxgpt.GPT(config), params, jnp.asarray(ids, jnp.int32)))


def test_logits(adapted):
    """Compare an imported adapter, and its export loaded by PEFT."""
    case, theirs, folder = adapted
    lm = jaxgpt.load(folder / "run")
    ids = np.random.default_rng(0).integers(0, V, (2, 13))
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.numpy()
        plain = CASES[case].build()(torch.tensor(ids)).logits.numpy()
    assert np.abs(expected - plain).max() > 0.1
    assert np.abs(logits(lm.config.model, lm.params, ids) - expected).max() < 2e-5
    export_adapter(folder / "run", folder / "exported")
    again = peft.PeftModel.from_pretrained(CASES[case].build(), str(folder / "exported")).eval()
    with torch.no_grad():
        assert np.abs(again(torch.tensor(ids)).logits.numpy() - expected).max() < 2e-5


def test_a_step_of_adamw(adapted):
    _, theirs, folder = adapted
    ids = np.random.default_rng(3).integers(0, V, (4, 15))
    trained = [parameter for parameter in theirs.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    out = theirs(torch.tensor(ids[:, :-1])).logits
    torch.nn.functional.cross_entropy(out.reshape(-1, V), torch.tensor(ids[:, 1:]).reshape(-1)).backward()
    optimizer.step()
    theirs.save_pretrained(folder / "stepped")

    config, params, adapters = load_adapters(folder / "run", "best")
    optim = OptimConfig(
        learning_rate=RATE, beta2=0.95, eps=1e-6, grad_clip=0.0, schedule="constant", warmup_steps=0, weight_decay=0.1
    )
    optimizer = jaxgpt.make_optimizer(Config(optim=optim))
    objective = jaxgpt.next_token_loss(jaxgpt.GPT(config.model).apply)
    with jax.default_matmul_precision("highest"):
        step = functools.partial(
            jaxgpt.train_step,
            objective=lambda adapters, *batch: objective(merge(params, adapters, config.lora.alpha), *batch),
            optimizer=optimizer,
        )
        state, _ = jax.jit(step)(jaxgpt.init_state(adapters, optimizer), jnp.asarray(ids, jnp.int32))
    lora, expected = read_adapter(folder / "stepped", config.model)
    assert lora == config.lora
    moved = flatten_params(expected)
    ours = flatten_params(state.params)
    assert moved.keys() == ours.keys()
    for name, value in moved.items():
        assert np.abs(np.asarray(ours[name]) - value).max() < 1e-5, name
        assert np.abs(value - np.asarray(flatten_params(adapters)[name])).max() > RATE / 2, name


def test_what_is_not_supported_can_be_merged(tmp_path):
    """The advice of the error works: importing the result of PEFT's merge_and_unload keeps its logits."""
    config = peft.LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM", use_dora=True)
    theirs = peft.get_peft_model(CASES["llama"].build(), config).eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            parameter.data += torch.randn(parameter.shape, generator=generator) * 0.2
    theirs.save_pretrained(tmp_path / "adapter")
    CASES["llama"].build().save_pretrained(tmp_path / "hf")
    import_model(tmp_path / "hf", tmp_path / "base", "ids")
    with pytest.raises(UserError, match="merge_and_unload"):
        import_adapter(tmp_path / "adapter", tmp_path / "run", str(tmp_path / "base"))
    ids = np.random.default_rng(0).integers(0, V, (2, 13))
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.numpy()
    theirs.merge_and_unload().save_pretrained(tmp_path / "merged")
    import_model(tmp_path / "merged", tmp_path / "run", "ids")
    lm = jaxgpt.load(tmp_path / "run")
    assert np.abs(logits(lm.config.model, lm.params, ids) - expected).max() < 2e-5


def test_all_linear_names_the_modules_that_peft_names(tmp_path):
    for case in ("gpt2", "gpt_neox", "gemma3_text"):
        model = CASES[case].build()
        model.save_pretrained(tmp_path / case)
        ours = open_model(tmp_path / case).config
        config = peft.LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        tensors = peft.get_peft_model_state_dict(peft.get_peft_model(model, config))
        lora = LoraConfig(rank=RANK, targets=resolve_targets(ours, LoraConfig(rank=RANK, targets="all-linear")))
        count = sum(leaf.size for leaf in jax.tree.leaves(abstract_trained(ours, lora)))
        assert count == sum(tensor.numel() for tensor in tensors.values())


@pytest.mark.parametrize("init", KEEPS_BASE)
def test_initializations_that_keep_the_base_are_read(init, tmp_path):
    peft.LoraConfig(r=RANK, task_type="CAUSAL_LM", init_lora_weights=init).save_pretrained(tmp_path)
    assert read_config(tmp_path / "adapter_config.json") == (RANK, 8.0)
