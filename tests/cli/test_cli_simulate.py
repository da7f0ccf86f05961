"""``pp-offload simulate``: a row for each rank, and every error as a new user meets it."""

from __future__ import annotations

import json
import sys
from io import StringIO
from pathlib import Path

import pytest
import torch
from transformers import Gemma2Config, GPT2Config, LlamaConfig, PretrainedConfig
from typer.testing import CliRunner

from pp_offload.cli.app import app
from pp_offload.cli.pipelines import progress_bar
from pp_offload.simulate.huggingface import groups_of, model_from_config, stages_of
from pp_offload.trace import read

SMALL = "--ranks 2 --microbatches 4 --length 256 --min-numel 1".split()
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
TINY = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=96,
)


@pytest.fixture(autouse=True)
def _beside_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the directory of the module: it is found without PYTHONPATH."""
    monkeypatch.chdir(Path(__file__).parent)


def run(*arguments: str) -> tuple[int, str]:
    """The exit code, and what is printed on one line; what has a traceback is raised."""
    done = CliRunner().invoke(app, ["simulate", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def test_a_row_for_each_rank(tmp_path: Path) -> None:
    trace = tmp_path / "out.json.gz"
    code, output = run("cli_models:good", *SMALL, "--trace", str(trace))
    assert code == 0, output
    assert "cli_models:good on 2 virtual H100, 1f1b, 1 stage each, 4 microbatches of 256" in output
    assert "linear and gelu may leave" in output
    assert [line.split()[0] for line in output.splitlines() if line[:1].isdigit()] == ["0", "1"]
    assert read(trace).ranks == [0, 1]


def test_figures_in_json() -> None:
    code, output = run("cli_models:good", *SMALL, "--json", "--groups", "linear")
    assert code == 0, output
    found = json.loads(output)
    none, ours = found["without offload"]["ranks"], found["with offload"]["ranks"]
    assert all(rank["bytes_offloaded"] == 0 for rank in none)
    assert [rank["num_in_flight"] for rank in ours] == [2, 1]
    nbytes = 256 * 64 * 2  # what a linear saves of each of four microbatches
    assert 0 < ours[0]["bytes_offloaded"] <= 4 * nbytes
    assert ours[1]["bytes_offloaded"] == 0, "its only group is the last one, which stays"


def test_a_model_of_hugging_face(tmp_path: Path) -> None:
    TINY.save_pretrained(tmp_path)
    for given in (tmp_path, tmp_path / "config.json"):
        code, output = run("--hf", str(given), *SMALL, "--groups", "mlp")
        assert code == 0, output
        assert "mlp may leave" in output


CAPPED = Gemma2Config(
    **{name: getattr(TINY, name) for name in SIZES}, head_dim=16, query_pre_attn_scalar=16
)
"""Its attention caps scores, which the kernel of the others does not."""


def test_attention_that_caps_scores(tmp_path: Path) -> None:
    CAPPED.save_pretrained(tmp_path)
    code, output = run("--hf", str(tmp_path), *SMALL, "--json")
    assert code == 0, output
    (rank, _) = json.loads(output)["with offload"]["ranks"]
    assert rank["bytes_offloaded"] > 4 * 256 * 256 * 2 * 4, "matrices of scores are saved"


@pytest.mark.parametrize("config", [TINY, CAPPED], ids=["llama", "gemma2"])
def test_stages_compute_what_the_model_computes(config: PretrainedConfig) -> None:
    torch.manual_seed(0)
    model = model_from_config(config, dtype=torch.float32).to_empty(device="cpu")
    with torch.no_grad():
        for one in model.parameters():
            one.normal_(std=0.1)
        for one in model.buffers():
            one.fill_(2.0)
        rotary = model.model.rotary_emb
        rotary.inv_freq.copy_(1e4 ** -torch.linspace(0, 1, len(rotary.inv_freq)))
    tokens = torch.randint(96, (2, 12))
    for num_stages in (1, 2, 5):
        stages = stages_of(model, num_stages)
        x = tokens
        for stage in stages:
            x = stage(x)
        assert torch.equal(x, model(tokens, use_cache=False).logits)
        num_layers = [len(stage.layers) for stage in stages]
        assert sum(num_layers) == 5 and max(num_layers) - min(num_layers) <= 1
    assert groups_of(stages[0]) == {"self_attn": "layers.*.self_attn", "mlp": "layers.*.mlp"}


def test_ranks_share_no_parameter_of_a_tied_model() -> None:
    config = LlamaConfig(**{**TINY.to_dict(), "tie_word_embeddings": True})
    first, last = stages_of(model_from_config(config), 2)
    assert not set(first.parameters()) & set(last.parameters())


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_where_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    with progress_bar() as bar:
        assert bar is None, "nobody looks"
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar() as bar:
        show = bar("with offload")
        for done in range(1, 11):
            show(done, 10)
    assert "with offload" in sys.stderr.getvalue()


GOOD = "cli_models:good --ranks 2"
WRONG = {
    "": "found neither of module:function and --hf, expected one of the two",
    "cli_models:good --hf x": "found both of module:function and --hf",
    "cli_models": "found 'cli_models', expected module:function",
    "cli_models:": "found 'cli_models:', expected module:function",
    "no_such_file:stages": "no module 'no_such_file' here or installed",
    "cli_models:nothing": "nothing of cli_models is not there, expected a function that takes",
    "cli_models:not_a_function": "not_a_function of cli_models is no function, expected",
    "cli_models:without_length": "unexpected keyword argument 'length'; expected a function",
    "cli_models:a_list": "returned a list, expected a function that takes num_stages and length",
    "cli_models:too_few": "returned 3 stages, expected num_stages: 4",
    "cli_models:on_the_cpu": "weight of stages[0] is on cpu, expected meta",
    "cli_models:no_such_module": "layers.*",
    "cli_models:unmarked --groups mlp": "but the model marks its groups itself; leave it out",
    f"{GOOD} --groups moe": "found 'moe', expected some of linear,gelu with commas",
    f"{GOOD} --groups ,": "found ',', expected some of linear,gelu with commas",
    f"{GOOD} --device H10": "found 'H10' (did you mean H100?), expected one of A100, H100",
    f"{GOOD} --schedule 1f1": "1f1 is none of gpipe, 1f1b",
    f"{GOOD} --virtual-stages 2": "1f1b takes --virtual-stages 1; try interleaved1f1b",
    f"{GOOD} --network-gb 0": "found 0, expected a number above 0",
    f"{GOOD} --fraction 2": "'--fraction': Input should be less than or equal to 1",
    f"{GOOD} --ranks 0": "'--ranks': Input should be greater than or equal to 1",
    f"{GOOD} --gib nan": "'--gib': Input should be greater than or equal to 0",
    f"{GOOD} --gib inf": "--gib: found inf, expected a finite number",
    f"{GOOD} --network-gb nan": "--network-gb: found nan, expected a finite number",
    f"{GOOD} --host-gib inf": "--host-gib: found inf, expected a finite number",
    f"{GOOD} --fraction nan": "'--fraction': Input should be less than or equal to 1",
    f"{GOOD} --trace no_such_folder/out.json": "expected a file in a directory that is there",
    "--hf no_such_folder/config.json": "found no file or directory 'no_such_folder/config.json', ",
    "--hf nowhere.json": "found no file or directory 'nowhere.json', and no",
    "--hf ./nowhere": "found no file or directory './nowhere', and no",
    "--hf /nowhere": "found no file or directory '/nowhere', and no",
}


@pytest.mark.parametrize("typed", WRONG)
def test_wrong_options_are_explained(typed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code, output = run(*typed.split())
    assert code == 2 and WRONG[typed] in output, output
    assert "Traceback" not in output and "huggingface.co" not in output


def test_a_model_that_cannot_be_cut_is_explained(tmp_path: Path) -> None:
    GPT2Config(n_layer=2, n_embd=64, n_head=2).save_pretrained(tmp_path)
    code, output = run("--hf", str(tmp_path), "--ranks", "2")
    assert code == 2 and "expected a decoder made like Llama's" in output, output
    TINY.save_pretrained(tmp_path)
    code, output = run("--hf", str(tmp_path), "--ranks", "6")
    assert code == 2 and "there are 6 stages for 5 layers, expected 1 to 5" in output, output


SMALL_CONFIG = {**TINY.to_dict(), "head_dim": 16, "pad_token_id": 0}
NOT_OF_OTHERS = ("architectures", "rope_parameters", "rope_theta", "rope_scaling")
NOT_AS_LLAMA = {
    "gemma3_text": "Gemma3ForCausalLM cannot run in stages without data (TypeError: Gemma3Rotary",
    "llama4_text": "cannot be made (ValueError: Llama4ForCausalLM does not support setting exper",
    "t5": "cannot be made (ValueError: Unrecognized configuration class",
}


@pytest.mark.parametrize("kind", NOT_AS_LLAMA)
def test_a_model_that_does_not_run_as_llama_is_explained(kind: str, tmp_path: Path) -> None:
    config = {name: SMALL_CONFIG[name] for name in SMALL_CONFIG if name not in NOT_OF_OTHERS}
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": kind}))
    code, output = run("--hf", str(tmp_path), *SMALL)
    assert code == 2 and NOT_AS_LLAMA[kind] in output and "--hf" in output, output
    assert "give another, or stages of your own with module:function" in output


def test_a_config_with_a_value_that_cannot_be_is_explained(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": "many"}')
    code, output = run("--hf", str(tmp_path), *SMALL)
    assert code == 2 and "found no config of Transformers at" in output, output


def test_an_error_of_the_model_keeps_its_traceback() -> None:
    with pytest.raises(ValueError, match="what went wrong in my model"):
        run("cli_models:broken")


def test_a_module_that_lacks_another_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lacking.py").write_text("import nothing_like_it\n")
    with pytest.raises(ModuleNotFoundError, match="nothing_like_it"):
        run("lacking:stages")
