"""An exported checkpoint in stock transformers: by blocks with our code, token by token without."""

import copy
import functools
import json
import os
from typing import Any

import pytest
import torch
import transformers
from conftest import copied

from setblock import finetune
from setblock.adapters import attach
from setblock.export import export
from setblock.generation import generate
from setblock.loading import load
from setblock.model import Model
from setblock.nano import problems

PROMPTS = ("two and two", "a bird")
ANY: Any = transformers


@pytest.fixture(scope="module")
def exported(checkpoint, tmp_path_factory):
    settings = {"trained": True, "block_size": 4, "solver": "fixed:2", "acceptance": 0.7}
    folder = tmp_path_factory.mktemp("exported") / "model"
    export(load(checkpoint("llama", settings=settings), device="cpu"), folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(exported):
    made = ANY.AutoTokenizer.from_pretrained(exported)
    made.padding_side = "left"
    return made


@pytest.fixture(scope="module")
def network(exported):
    return ANY.AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True)


def new(network, ids, **options: Any) -> list[list[int]]:
    """The answers' ids, padding cut."""
    width = ids["input_ids"].shape[1]
    found = network.generate(**ids, **options)
    assert found[:, :width].equal(ids["input_ids"])
    pad = network.config.pad_token_id
    return [[t for t in row if t != pad] for row in found[:, width:].tolist()]


def ours(exported, **options: Any) -> list[list[int]]:
    return [list(one.token_ids) for one in generate(load(exported), PROMPTS, **options)]


def test_the_files_may_be_read_by_others(exported):
    os.umask(mask := os.umask(0))
    modes = {
        file.name: file.stat().st_mode & 0o777 for file in exported.iterdir() if file.is_file()
    }
    assert "model.safetensors" in modes
    assert set(modes.values()) == {0o666 & ~mask}


def test_settings_are_those_of_the_model(exported, checkpoint):
    model = load(exported)
    assert model.trained
    assert model.defaults == {"mode": "sbd", "solver": "fixed:2", "block_size": 4}
    assert (model.acceptance, model.acceptance_is_known) == (0.7, True)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mode": "verified", "branches": 2, "seeds": 1},
        {"mode": "verified", "block_size": 3, "lookup": 6},
        {"mode": "verified", "block_size": 4, "lenience": 0.1},
        {"mode": "ntp"},
        {"solver": "entropy:inf", "block_size": 7},
        {"next_token_seed": True, "fallback": 2.0},
        {"slide": True},
        {"mode": "verified", "draft": "solver", "solver": "fixed:2"},
    ],
)
def test_generate_decodes_as_we_do(exported, network, tokenizer, options):
    ids = tokenizer(list(PROMPTS), return_tensors="pt", padding=True)
    expected = ours(exported, **options, max_new_tokens=10)
    assert new(network, ids, **options, max_new_tokens=10) == expected


def test_prompts_by_position_and_a_length(exported, network, tokenizer):
    ids = tokenizer(PROMPTS[0], return_tensors="pt")["input_ids"]
    expected = ours(exported, max_new_tokens=6)[0]
    assert network.generate(ids, max_new_tokens=6)[0, ids.shape[1] :].tolist() == expected
    config = transformers.GenerationConfig(max_length=ids.shape[1] + 6, num_beams=1)
    found = network.generate(input_ids=ids, generation_config=config)
    assert found[0, ids.shape[1] :].tolist() == expected
    config = transformers.GenerationConfig(max_length=ids.shape[1], num_beams=1)
    with pytest.raises(ValueError, match=f"max_length={ids.shape[1]} leaves no room behind"):
        network.generate(input_ids=ids, generation_config=config)


def test_sampling_takes_its_seed_from_torch(exported, network, tokenizer):
    ids = tokenizer(PROMPTS[0], return_tensors="pt")
    options = {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "top_k": 20}
    torch.manual_seed(5)
    first = new(network, ids, **options, max_new_tokens=12)
    torch.manual_seed(5)
    assert new(network, ids, **options, max_new_tokens=12) == first
    plain = {"temperature": 0.9, "top_p": 0.95, "top_k": 20}
    seeded = new(network, ids, **options, max_new_tokens=12, seed=3)
    assert seeded[0] == ours(exported, **plain, max_new_tokens=12, seed=3)[0]
    assert first != seeded


def test_repetition_penalty_and_min_p_are_those_of_transformers(network, tokenizer, exported):
    """Of the call or of the checkpoint; blocks verify them."""
    ids = tokenizer(list(PROMPTS), return_tensors="pt", padding=True)
    found = new(network, ids, repetition_penalty=1.4, max_new_tokens=12)
    assert found == ours(exported, mode="ntp", repetition_penalty=1.4, max_new_tokens=12)
    assert found != new(network, ids, max_new_tokens=12, mode="ntp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network.generation_config, "repetition_penalty", 1.4)
        assert new(network, ids, max_new_tokens=12) == found
    later = new(network, ids, min_new_tokens=11, logit_bias={5: 3.0}, max_new_tokens=12)
    how = {"mode": "ntp", "min_new_tokens": 11, "logit_bias": {5: 3.0}, "max_new_tokens": 12}
    assert later == ours(exported, **how)
    greedy = ours(exported, max_new_tokens=12)
    sampled = {"do_sample": True, "min_p": 1.0, "max_new_tokens": 12}
    assert new(network, ids, **sampled) == greedy


def test_a_given_configuration_leaves_the_rest_to_the_checkpoint(network, tokenizer, monkeypatch):
    ids = tokenizer(PROMPTS[0], return_tensors="pt")
    given = transformers.GenerationConfig(max_new_tokens=4)
    monkeypatch.setattr(network.generation_config, "length_penalty", 3.0)
    with pytest.raises(ValueError, match=r"length_penalty=3\.0 is not supported"):
        network.generate(**ids, generation_config=given)


def test_padding_is_seen_without_a_mask(exported, network, tokenizer):
    ids = tokenizer(list(PROMPTS), return_tensors="pt", padding=True)["input_ids"]
    found = network.generate(ids, max_new_tokens=6)
    pad = tokenizer.pad_token_id
    rows = [[t for t in row if t != pad] for row in found[:, ids.shape[1] :].tolist()]
    assert rows == ours(exported, max_new_tokens=6)


def test_sampling_without_top_k_takes_that_of_transformers(exported, network, tokenizer):
    ids = tokenizer(PROMPTS[0], return_tensors="pt")
    options = {"do_sample": True, "temperature": 3.0, "max_new_tokens": 12, "seed": 3}
    [expected, _] = ours(exported, temperature=3.0, top_k=50, max_new_tokens=12, seed=3)
    assert new(network, ids, **options) == [expected]


def test_ends_and_stop_texts(exported, network, tokenizer):
    ids = tokenizer(PROMPTS[0], return_tensors="pt")
    [whole] = new(network, ids, max_new_tokens=12)
    [cut] = new(network, ids, max_new_tokens=12, eos_token_id=whole[4])
    assert cut == whole[: whole.index(whole[4]) + 1]
    text = tokenizer.decode(whole)
    # Bytes that are no character are shown as U+FFFD, which no stop text may hold.
    stop = next(text[i : i + 2] for i in range(1, len(text) - 3) if "\ufffd" not in text[i : i + 2])
    [stopped] = new(network, ids, max_new_tokens=12, stop_strings=stop, tokenizer=tokenizer)
    assert stop in tokenizer.decode(stopped)
    assert len(stopped) < len(whole)
    assert new(network, ids, max_new_tokens=12) == [whole]  # the end token was that call's own
    for ends in (torch.tensor(whole[4]), torch.tensor([whole[4]])):
        assert new(network, ids, max_new_tokens=12, eos_token_id=ends) == [cut]


def test_no_end_token_is_none(network, tokenizer, monkeypatch):
    ids = tokenizer(PROMPTS[0], return_tensors="pt")
    [whole] = new(network, ids, max_new_tokens=12)
    monkeypatch.setattr(network.generation_config, "eos_token_id", whole[4])
    monkeypatch.setattr(network._setblock, "eos_token_ids", frozenset([whole[4]]))
    [cut] = new(network, ids, max_new_tokens=12)
    assert cut == whole[: whole.index(whole[4]) + 1]
    assert new(network, ids, max_new_tokens=12, eos_token_id=None) == [whole]
    # A token of the prompt that would be the padding is still one of the prompt.
    monkeypatch.setattr(network.generation_config, "pad_token_id", None)
    monkeypatch.setattr(network._setblock, "pad_token_id", int(ids["input_ids"][0, 1]))
    found = network.generate(ids["input_ids"], max_new_tokens=12, eos_token_id=None)
    assert found[0, ids["input_ids"].shape[1] :].tolist() == whole


def test_settings_of_decoding_may_change(exported, network, tokenizer, monkeypatch):
    ids = tokenizer(PROMPTS[0], return_tensors="pt")
    before = ours(exported, max_new_tokens=12)[0]
    alone = ours(exported, max_new_tokens=12, mode="ntp")[0]
    assert before != alone
    given = copy.deepcopy(network.generation_config)
    given.setblock["mode"] = "ntp"
    assert new(network, ids, max_new_tokens=12) == [before]
    assert new(network, ids, max_new_tokens=12, generation_config=given) == [alone]
    assert new(network, ids, max_new_tokens=12) == [before]
    monkeypatch.setitem(network.generation_config.setblock, "mode", "ntp")
    assert new(network, ids, max_new_tokens=12) == [alone]


def part_of(text: str) -> str:
    """Two characters out of its middle, none of them half of one, which no stop text may hold."""
    places = range(len(text) // 2, len(text) - 1)
    return next(text[i : i + 2] for i in places if "\ufffd" not in text[i : i + 2])


def test_stopping_criteria_that_are_texts_lengths_and_ends(exported, network, tokenizer):
    """As the settings of the same meaning, which they replace where both are given."""
    ids = tokenizer(PROMPTS[0], return_tensors="pt")
    width = ids["input_ids"].shape[1]
    [whole] = new(network, ids, max_new_tokens=12)
    stop = part_of(tokenizer.decode(whole))

    def given(*criteria: Any, **options: Any) -> list[int]:
        criteria = ANY.StoppingCriteriaList(criteria)
        return new(network, ids, **{"max_new_tokens": 12, **options}, stopping_criteria=criteria)[0]

    [expected] = new(network, ids, max_new_tokens=12, stop_strings=stop, tokenizer=tokenizer)
    text = ANY.StopStringCriteria(tokenizer, stop)
    assert given(text) == given(text, stop_strings="never said") == expected
    assert len(expected) < len(whole)
    length = ANY.MaxLengthCriteria(width + 5)
    assert given(length) == given(length, max_new_tokens=2) == whole[:5]
    assert given(ANY.MaxLengthCriteria(width + 9), length, text) == min(
        expected, whole[:5], key=len
    )
    first = whole.index(whole[4]) + 1
    assert given(ANY.EosTokenCriteria(whole[4])) == whole[:first]
    assert given(ANY.EosTokenCriteria([whole[4], 9**9])) == whole[:first]
    assert given() == whole


def test_a_special_token_as_a_stop_text_ends_an_answer(exported, network, tokenizer, monkeypatch):
    ids = tokenizer(PROMPTS[0], return_tensors="pt")
    [whole] = new(network, ids, max_new_tokens=12)
    name = tokenizer.convert_ids_to_tokens(whole[4])
    monkeypatch.setattr(network._setblock, "special_tokens", ("</s>", name))
    [found] = new(network, ids, max_new_tokens=12, stop_strings=["</s>", name])
    assert found == whole[: whole.index(whole[4]) + 1]
    assert new(network, ids, max_new_tokens=12) == [whole]


@pytest.mark.filterwarnings("ignore")  # lm-eval's own
@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("name", ["tiny", "nano"])
def test_lm_eval_itself_decodes_by_blocks(exported, tmp_path, name, batch_size):
    """Its own model `hf` says what `setblock.generate` says; each stop text is a criterion."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    folder, prompts = exported, [*PROMPTS, "x"]
    if name == "nano":
        folder = tmp_path / "nano"
        export(load("nano"), folder)
        prompts = [f"{one.prompt}\n" for one in problems("arithmetic", "validation", 3)]
    model = load(folder, device="cpu")
    plain = generate(model, prompts, max_new_tokens=30)
    until = [part_of(plain[0].text), part_of(plain[1].text)]
    options: Any = {"until": until, "max_gen_toks": 30, "do_sample": False}
    made: Any = HFLM  # its decorator hides its arguments from type checkers
    harness = made(
        pretrained=str(folder), trust_remote_code=True, device="cpu", batch_size=batch_size
    )
    asked = [Instance("generate_until", {}, (prompt, options), 0) for prompt in prompts]
    texts = harness.generate_until(asked, disable_tqdm=True)
    assert harness.model._setblock.name == str(folder), "the stock code has decoded"
    expected = generate(model, prompts, max_new_tokens=30, stop=until)
    assert texts == [one.text for one in expected]
    assert sum(one.finish_reason == "stop" for one in expected) >= 2
    assert texts != [one.text for one in plain]


class Streamer:
    def __init__(self) -> None:
        self.pieces: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.pieces.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("mode", ["sbd", "verified", "ntp"])
def test_a_streamer_gets_every_token_once_in_order(exported, network, tokenizer, mode):
    ids = tokenizer(PROMPTS[0], return_tensors="pt")
    streamer = Streamer()
    [whole] = new(network, ids, max_new_tokens=11, mode=mode, streamer=streamer)
    prompt, *pieces = streamer.pieces
    assert prompt == ids["input_ids"][0].tolist()
    assert [token for piece in pieces for token in piece] == whole
    assert streamer.ended == 1
    assert len(pieces) > 1
    both = tokenizer(list(PROMPTS), return_tensors="pt", padding=True)
    with pytest.raises(ValueError, match="streamer takes one prompt at a time, got 2"):
        network.generate(**both, streamer=streamer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 4}, "num_beams=4 is not supported"),
        ({"num_return_sequences": 2}, "num_return_sequences=2 is not supported"),
        ({"length_penalty": 1.2}, "length_penalty=1.2 is not supported"),
        ({"repetition_penalty": -1.0}, "repetition_penalty must be a number in 0.01..100"),
        ({"output_scores": True}, "output_scores=True is not supported"),
        ({"logits_processor": [1]}, "logits_processor is not supported"),
        ({"assistant_model": object()}, "assistant_model is not supported"),
        (
            {"stopping_criteria": [ANY.MaxTimeCriteria(3)]},
            "stopping criterion MaxTimeCriteria is not supported by set block decoding: known are",
        ),
        ({"suppress_tokens": [5]}, r"suppress_tokens=\[5\] is not supported"),
        ({"gama": 0.3}, "gama is not supported"),
        ({"solver": "best"}, "solver must be one of"),
        ({"max_new_tokens": 0}, "max_new_tokens.? must be"),
    ],
)
def test_what_we_have_not_is_refused_by_name(network, tokenizer, options, message):
    ids = tokenizer(PROMPTS[0], return_tensors="pt")
    with pytest.raises(ValueError, match=message):
        network.generate(**ids, **{"max_new_tokens": 4, **options})
    with pytest.raises(ValueError, match="generate needs input_ids"):
        network.generate(max_new_tokens=4)


def test_without_trust_it_decodes_token_by_token(exported, tokenizer):
    stock = ANY.AutoModelForCausalLM.from_pretrained(exported)
    mask = load(exported).mask_token_id
    assert stock.generation_config.suppress_tokens == [mask]
    with torch.no_grad():  # it would say nothing but the mask token
        stock.get_output_embeddings().weight[mask] = 0
    ids = tokenizer(PROMPTS[0], return_tensors="pt")
    found = new(stock, ids, max_new_tokens=8, do_sample=False)
    assert mask not in found[0]
    same = ANY.AutoModelForCausalLM.from_pretrained(exported)
    expected = ours(exported, mode="ntp", max_new_tokens=8)
    assert new(same, ids, max_new_tokens=8, do_sample=False)[0] == expected[0]


def test_without_this_package_it_says_what_to_install(exported, network, tokenizer, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "setblock.custom_generate", None)
    ids = tokenizer(PROMPTS[0], return_tensors="pt")
    with pytest.raises(ImportError, match="pip install setblock"):
        network.generate(**ids, max_new_tokens=2)


def test_the_bundled_model(tmp_path):
    export(load("nano"), tmp_path / "nano")
    network = ANY.AutoModelForCausalLM.from_pretrained(tmp_path / "nano", trust_remote_code=True)
    tokenizer = ANY.AutoTokenizer.from_pretrained(tmp_path / "nano")
    turns = [{"role": "user", "content": "What is 384 + 967?"}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt")
    found = network.generate(**ids, max_new_tokens=100)
    text = tokenizer.decode(found[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    assert "1351" in text


def test_command(run, checkpoint, tmp_path):
    folder = checkpoint("llama", settings={"trained": True})
    words = ("--dtype", "float32", "--mask-token-id", "7")
    found = run("export", folder, tmp_path / "out", *words, "--json").json
    assert found["output_dir"] == str(tmp_path / "out")
    assert load(tmp_path / "out").mask_token_id == 7
    assert "is not empty" in run("export", folder, tmp_path / "out").error
    told = run("export", folder, tmp_path / "more")
    assert "for stock transformers" in told.out
    assert "never trained for blocks" not in told.err
    told = run("export", checkpoint("llama"), tmp_path / "untrained")
    assert "it was never trained for blocks, so that it decodes token by token" in told.err


@pytest.mark.parametrize("there", [True, False])
def test_an_interrupt_leaves_no_half_of_a_checkpoint(checkpoint, tmp_path, monkeypatch, there):
    """So that the same words do it again."""
    model, folder = load(checkpoint("llama", settings={"trained": True})), tmp_path / "out"
    if there:
        folder.mkdir()

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    for write in (export, functools.partial(finetune.merge, dtype="float32")):
        with monkeypatch.context() as patch:
            for module in ("export", "finetune"):
                patch.setattr(f"setblock.{module}.write_settings", interrupted)
            with pytest.raises(KeyboardInterrupt):
                write(model, folder)
        assert folder.exists() == there
        assert not there or not list(folder.iterdir())
    export(model, folder)
    assert load(folder).trained
    with pytest.raises(ValueError, match="is not empty"):
        finetune.merge(model, folder, "float32")
    assert load(folder).trained


def test_settings_that_blocks_have_not_are_left_out(run, checkpoint, tmp_path, caplog):
    whole = checkpoint("llama", settings={"trained": True})
    wanted = {
        "repetition_penalty": 1.05,
        "length_penalty": 1.05,
        "min_new_tokens": 7,
        "suppress_tokens": [5, 6],
        "do_sample": True,
        "top_k": 20,
    }
    folder = copied(whole, tmp_path / "model", "generation_config.json", **wanted)
    run("export", folder, tmp_path / "out")
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder} asks for {one}, which decoding by blocks has not: left out"
        for one in (
            "length_penalty=1.05",
            "repetition_penalty=1.05",
            "min_new_tokens=7",
            "suppress_tokens=[5, 6]",
        )
    ]
    content = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert not content.keys() & {"length_penalty", "repetition_penalty", "min_new_tokens"}
    assert content["suppress_tokens"] == [load(folder).mask_token_id]
    assert content["top_k"] == 20
    network = ANY.AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert network.generate(torch.tensor([[5, 6]]), max_new_tokens=3, do_sample=False).shape[1] == 5


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_a_gated_adapter_is_refused(checkpoint, tmp_path):
    base = load(checkpoint("llama", mask_token="<mask>"))
    network = attach(base.network, base.name, "gated", base.mask_token_id, 4, 8)
    with pytest.raises(ValueError, match="is a gated adapter"):
        export(Model(network, base.tokenizer, "mine"), tmp_path / "out")
