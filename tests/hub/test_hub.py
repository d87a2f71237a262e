"""Pushes to a Hub of this machine, by its own client: what arrives is what was sent, or an error says what is not."""

import importlib.metadata
import itertools
import json
import logging
import os
import re
import shutil
import time
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from cells import short_rows
from command_runs import hf_zero, refusals
from hostile_folders import make_card
from hub_server import CLIENT_SETTINGS, TOKEN, USER, Fault, HubServer, talk_to
from huggingface_hub import HfApi, constants
from hypothesis import example, given
from hypothesis import strategies as st
from launching import run_forked
from markdown_it import MarkdownIt
from safetensors.torch import load_file, save_file
from shared_ranks import run_on_ranks
from trainer_job import as_launched, make_trainer, run
from training import bert
from transformers import AutoModelForSequenceClassification, Trainer

from hf_zero.checkpoint.faults import CheckpointError
from hf_zero.checkpoint.faults import shown as printed
from hf_zero.checkpoint.verify import checkpoint_faults
from hf_zero.hub import card as model_card
from hf_zero.hub import trainer_push, upload
from hf_zero.hub.card import TEMPLATE
from hf_zero.hub.upload import Destination, HubError, push_folder
from hf_zero.integrations.run_facts import CardFacts
from hf_zero.integrations.weights import weight_faults

pytestmark = pytest.mark.timeout(150)

REPO = f"{USER}/model"
SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "logging_steps": 1}


@pytest.fixture(autouse=True)
def as_at_first(monkeypatch):
    for name in CLIENT_SETTINGS:
        monkeypatch.setattr(constants, name, getattr(constants, name))
    monkeypatch.setattr(upload, "WAITS_S", (0.02, 0.02, 0.02))
    monkeypatch.setenv("HF_TOKEN", TOKEN)


@pytest.fixture
def server():
    with HubServer() as running:
        talk_to(running.url)
        yield running


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """By stage, the last checkpoint of a run on two ranks, and the weights that were live when it was saved."""
    known: dict[int, tuple[Path, dict]] = {}

    def outcome(stage: int) -> tuple[Path, dict]:
        if stage not in known:
            folder = tmp_path_factory.mktemp(f"stage{stage}")
            first = run_on_ranks(run, door=f"flag {stage}", model="bert", output_dir=str(folder), **SAVING)[0]
            known[stage] = folder / "checkpoint-4", first["state"]
        return known[stage]

    return outcome


@pytest.fixture
def plain(tmp_path) -> Path:
    """A model folder in four weights files."""
    torch.manual_seed(1)
    bert().save_pretrained(tmp_path / "plain", max_shard_size="26KB")
    assert len(list((tmp_path / "plain").glob("model-0000?-of-00004.safetensors"))) == 4
    return tmp_path / "plain"


def api_of(server: HubServer) -> HfApi:
    return HfApi(endpoint=server.url, token=TOKEN)


def downloaded(server: HubServer, out: Path, repo_id: str = REPO, **where: object) -> Path:
    return Path(api_of(server).snapshot_download(repo_id, local_dir=out, **where))


def weights_of(folder: Path) -> dict[str, list]:
    state = AutoModelForSequenceClassification.from_pretrained(folder).state_dict()
    return {name: value.float().tolist() for name, value in state.items()}


def flip(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


# ---- the model that arrives ----


@pytest.mark.slow
@pytest.mark.short_cells("3")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_pushed_checkpoint_comes_down_as_the_live_weights(stage, trained, server, tmp_path):
    checkpoint, live = trained(stage)
    result = hf_zero("push", checkpoint, REPO, "--private")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith(f"{server.url}/{REPO}/commit/")
    assert server.repos[REPO].private
    assert set(server.files(REPO)) == {"README.md", "config.json", "loss.png", "model.safetensors"}
    assert weights_of(downloaded(server, tmp_path / "down")) == live
    assert not list(checkpoint.parent.glob(".tmp-*"))


@pytest.mark.slow
def test_dtype_shard_size_and_revision_are_as_asked(trained, server, tmp_path):
    checkpoint, live = trained(3)
    options = ("--revision", "half", "--dtype", "bfloat16", "--max-shard-size", "30KB")
    assert hf_zero("push", checkpoint, REPO, *options).exit_code == 0
    assert server.files(REPO) == {}
    down = downloaded(server, tmp_path / "down", revision="half")
    files = list(down.glob("*.safetensors"))
    assert len(files) > 1 and all(t.dtype == torch.bfloat16 for file in files for t in load_file(file).values())
    expected = {name: torch.tensor(value).bfloat16().tolist() for name, value in live.items()}
    assert weights_of(down) == expected


def test_a_model_folder_goes_as_it_is_without_what_belongs_to_a_run(plain, server):
    (plain / "README.md").write_text("# by hand\n")
    (plain / "1_Pooling").mkdir()
    (plain / "1_Pooling" / "config.json").write_text("{}")
    sent = {path.relative_to(plain).as_posix(): path.read_bytes() for path in plain.rglob("*") if path.is_file()}
    for name in (
        "optimizer.pt",
        "training_args.bin",
        ".hidden",
        "checkpoint-7/model.safetensors",
        "zero/manifest.json",
    ):
        (plain / name).parent.mkdir(exist_ok=True)
        (plain / name).write_text(TOKEN)
    # A manifest is a claim to be a checkpoint, which this one's is not.
    assert refusals("push", plain, REPO)[0].startswith(f"hf_zero: {plain} has faults, so nothing was pushed: ")
    shutil.rmtree(plain / "zero")
    assert hf_zero("push", plain, REPO).exit_code == 0
    assert server.files(REPO) == sent


@pytest.mark.slow
def test_weights_of_an_earlier_push_do_not_outlive_the_next(plain, server, tmp_path):
    one_file = tmp_path / "one"
    bert().save_pretrained(one_file)
    assert hf_zero("push", one_file, REPO).exit_code == 0
    assert "model.safetensors" in server.files(REPO)
    assert hf_zero("push", plain, REPO).exit_code == 0
    # from_pretrained would have read the old model.safetensors before the new index.
    assert "model.safetensors" not in server.files(REPO)
    assert weights_of(downloaded(server, tmp_path / "down")) == weights_of(plain)


def test_an_adapter_is_pushed_and_leaves_the_base_models_weights(plain, server, tmp_path):
    from peft import LoraConfig, get_peft_model

    assert hf_zero("push", plain, REPO).exit_code == 0
    before = server.files(REPO)
    adapted = get_peft_model(bert(), LoraConfig(r=2, target_modules=["query"]))
    adapted.save_pretrained(tmp_path / "adapter")
    assert hf_zero("push", tmp_path / "adapter", REPO).exit_code == 0
    after = server.files(REPO)
    assert {"adapter_model.safetensors", "adapter_config.json"} <= set(after)
    assert all(after[name] == content for name, content in before.items() if name.endswith(".safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "says"), [("llama", "NESTED"), ("bert", "FOUR")])
def test_adapters_on_a_packed_base_are_saved_resumed_merged_and_pushed(name, says, server, tmp_path):
    """At stage 3 as at stage 2, which has the losses of DDP, on two and three ranks."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes, of the extra `dev`, is not installed")
    import packed_bases

    says = getattr(packed_bases, says)
    bases = packed_bases.save_bases(tmp_path / "bases")
    adapt = partial(packed_bases.in_its_place, bases=bases, name=name, says=says)
    saving = {"model": name, "adapt": adapt, "save_strategy": "steps", "save_steps": 4}

    def outcome(door: str, world_size: int = 2, **more: object) -> dict:
        folder = str(tmp_path / f"{door} {world_size} {len(more)}")
        return run_on_ranks(
            packed_bases.trained_and_merged, world_size, door=door, output_dir=folder, **saving, **more
        )[0]

    ddp, stage_2, stage_3 = (outcome(door) for door in ("ddp", "flag 2", "flag 3"))
    assert stage_3["losses"] == stage_2["losses"] == ddp["losses"] == outcome("flag auto")["losses"]
    assert stage_3["merged"] == stage_2["merged"]
    # Adapters gathered in float32, as autocast finds them under DDP.
    in_bf16 = [outcome(door, bf16=True)["losses"] for door in ("ddp", "flag stage=3,param_dtype=float32")]
    assert in_bf16[0] == in_bf16[1] != ddp["losses"]
    run = tmp_path / "flag 3 2 0"
    for world_size in (2, 3):
        ours, theirs = (outcome(door, world_size, resume=str(run / "checkpoint-4")) for door in ("flag 3", "flag 2"))
        assert (ours["losses"] == stage_3["losses"]) is (world_size == 2)
        assert ours == theirs if world_size == 2 else ours["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
        # Three ranks' shards of one stage end elsewhere than the other stage's, and so do the parts of the norm's sum.
        assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-6)
    assert hf_zero("push", run / "checkpoint-8", REPO).exit_code == 0
    arrived = downloaded(server, tmp_path / "adapter") / "adapter_model.safetensors"
    assert arrived.read_bytes() == (run / "checkpoint-8" / "adapter_model.safetensors").read_bytes()
    result = hf_zero("push", run / "merged", f"{USER}/merged")
    assert result.exit_code == 0, result.stderr
    merged = downloaded(server, tmp_path / "merged", f"{USER}/merged")
    model = packed_bases.MODELS[name][2].from_pretrained(merged, device_map={"": "cpu"})
    state = {key: value.float().tolist() for key, value in model.state_dict().items()}
    assert state == stage_3["merged"]


@pytest.mark.slow
def test_weights_in_a_file_a_rank_arrive_as_one_model(server, tmp_path):
    """As `save_pretrained(..., distributed_checkpoint=True)` writes them on two ranks: rows of each tensor."""
    model, folder = bert(), tmp_path / "saved"
    model.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    for rank in range(2):
        halves = {name: torch.tensor_split(value, 2)[rank].contiguous() for name, value in model.state_dict().items()}
        begins = {
            name: [rank * -(-len(value) // 2), *[0] * (value.dim() - 1)] for name, value in model.state_dict().items()
        }
        placed = {name: {"saved_offsets": begin} for name, begin in begins.items()}
        path = folder / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors"
        save_file(halves, path, metadata={"DCP_SHARDING_INFO": json.dumps(placed)})
    assert hf_zero("push", folder, REPO).exit_code == 0
    assert not [name for name in server.files(REPO) if name.startswith("shard-")]
    state = {name: value.float().tolist() for name, value in model.state_dict().items()}
    assert weights_of(downloaded(server, tmp_path / "down")) == state


def test_large_files_travel_in_parts_where_the_hub_wants_it(plain, tmp_path):
    with HubServer(part_bytes=20_000) as server:
        talk_to(server.url)
        assert hf_zero("push", plain, REPO).exit_code == 0
        assert server.count(r"^PUT .*/part/") > 4
        assert weights_of(downloaded(server, tmp_path / "down")) == weights_of(plain)


# ---- faults on the way ----


@pytest.mark.short_cells("PUT /lfs/-{'status': 500}", "POST .*/commit/-{'reset': True}")
@pytest.mark.parametrize(
    ("call", "what"),
    [
        (r"POST /api/repos/create", {"status": 500}),
        (r"POST /api/repos/create", {"reset": True}),
        (r"POST /api/validate-yaml", {"status": 503}),
        (r"POST .*/preupload/", {"status": 500}),
        (r"POST .*/objects/batch", {"reset": True}),
        (r"PUT /lfs/", {"status": 500}),
        (r"PUT /lfs/", {"reset": True}),
        (r"POST .*/verify", {"status": 502}),
        (r"POST .*/commit/", {"status": 500, "times": 2}),
        (r"POST .*/commit/", {"reset": True}),
        (r"GET .*/tree/[0-9a-f]{40}", {"status": 504}),
        (r"GET .*/tree/[0-9a-f]{40}", {"reset": True}),
        (r"", {"delay_s": 0.2, "times": 99}),
    ],
    ids=str,
)
def test_calls_that_fail_for_a_while_are_made_again(call, what, plain, server, tmp_path):
    fault = server.fail(call, **what)
    result = hf_zero("push", plain, REPO)
    assert result.exit_code == 0, result.stderr
    assert fault.times == 0 or fault.delay_s
    assert len(server.repos[REPO].messages) == 2, "the repository's own first commit, and one push"
    assert len(server.put) == len(set(server.put)), "no file arrived twice"
    assert weights_of(downloaded(server, tmp_path / "down")) == weights_of(plain)


def test_a_commit_whose_answer_was_lost_is_not_made_twice(plain, server):
    server.fail(r"POST .*/commit/", lose_answer=True)
    assert hf_zero("push", plain, REPO).exit_code == 0
    assert server.count(r"^POST .*/commit/") == 1
    assert len(server.repos[REPO].messages) == 2


def test_a_push_after_a_failed_one_sends_no_finished_file_again(plain, server):
    refused = server.fail(r"PUT /lfs/", status=403, times=0)
    weights = sorted(path.stat().st_size for path in plain.glob("*.safetensors"))
    # The first of the files arrives, and no other: they come side by side, so that the others wait for it.
    taken, places = server.take_fault, itertools.count()

    def all_but_the_first(line: str) -> Fault | None:
        if not line.startswith("PUT") or next(places) == 0:
            return taken(line)
        deadline_s = time.monotonic() + 30
        while not server.put and time.monotonic() < deadline_s:
            time.sleep(0.01)
        return refused

    server.take_fault = all_but_the_first
    line = refusals("push", plain, REPO)[-1]
    assert line.startswith(f"hf_zero: this push committed nothing to {REPO}: Error while uploading 'model-")
    assert "a fault of the test" in line and "files that have arrived are not sent again" in line
    arrived = list(server.put)
    assert len(arrived) == 1 < len(weights)
    assert len(server.repos[REPO].messages) == 1
    server.take_fault = taken
    assert hf_zero("push", plain, REPO).exit_code == 0
    assert server.put[: len(arrived)] == arrived
    assert len(server.put) == len(set(server.put)) == len(weights)


def test_a_second_push_of_the_same_sends_and_commits_nothing(plain, server):
    assert hf_zero("push", plain, REPO).exit_code == 0
    sent, commits = list(server.put), list(server.repos[REPO].messages)
    assert hf_zero("push", plain, REPO).exit_code == 0
    assert (server.put, server.repos[REPO].messages) == (sent, commits)


@pytest.mark.short_cells(
    "model-00003-<lambda>-model-00003-of-00004.safetensors is missing",
    "config.json-flip-config.json has a different git-sha1 there",
)
@pytest.mark.parametrize(
    ("file", "how", "said"),
    [
        (r"model-00001", flip, "model-00001-of-00004.safetensors has a different sha256 there"),
        (r"model-00002", lambda content: content[:-4], "has a different sha256 there"),
        (r"model-00003", lambda content: None, "model-00003-of-00004.safetensors is missing"),
        (r"config.json", flip, "config.json has a different git-sha1 there"),
        (r"README.md", lambda content: content + b"x", "README.md has"),
    ],
)
def test_what_arrived_otherwise_is_an_error_that_names_the_file(file, how, said, plain, server):
    server.corrupt(file, how)
    line = refusals("push", plain, REPO)[-1]
    assert re.match(rf"hf_zero: {REPO} at [0-9a-f]{{10}} differs from the pushed files: ", line)
    assert said in line


def test_a_comparison_that_cannot_be_made_is_said_to_be_missing(plain, server):
    server.fail(r"GET .*/tree/[0-9a-f]{40}", status=403, times=99)
    line = refusals("push", plain, REPO)[-1]
    assert "the files were committed" in line and "could not be compared" in line


# ---- what is refused ----


@pytest.mark.parametrize(
    ("repo_id", "said"),
    [
        ("a/b/c", "'a/b/c' is not a valid repository name"),
        ("me/has space", "'me/has space' is not a valid repository name"),
        ("somebody/model", '403: You don\'t have the rights to create a model under the namespace "somebody"'),
    ],
)
def test_a_wrong_repository_is_refused_in_one_line(repo_id, said, plain, server):
    [line] = refusals("push", plain, repo_id)
    assert line.startswith("hf_zero: ") and said in line
    assert server.repos == {} and server.put == []


def test_a_name_without_an_owner_is_of_the_account_of_the_token(plain, server):
    result = hf_zero("push", plain, "model", "--private")
    assert result.exit_code == 0, result.output
    assert list(server.repos) == [REPO] and server.repos[REPO].private
    assert f"/{REPO}/commit/" in result.stdout


def test_a_missing_and_a_wrong_token_are_refused_in_one_line(plain, server, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "hf_AnotherFakeTokenThatNobodyAccepts")
    [line] = refusals("push", plain, REPO)
    assert line == (
        f"hf_zero: this push committed nothing to {REPO}: the Hub does not accept the token; run `hf auth login` "
        "again, or set HF_TOKEN."
    )
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    before = list(server.requests)
    [line] = refusals("push", plain, REPO)
    assert line == (
        f"hf_zero: there is no token for writing to {REPO}. Run `hf auth login`, or set HF_TOKEN to a token with write access."
    )
    assert server.requests == before


def test_what_is_no_good_model_is_refused_before_anything_is_sent(trained, plain, server, tmp_path):
    damaged = Path(shutil.copytree(trained(3)[0], tmp_path / "damaged"))
    state = damaged / "zero" / "rank-00001-of-00002.safetensors"
    state.write_bytes(flip(state.read_bytes()))
    short = Path(shutil.copytree(plain, tmp_path / "short"))
    name = "model-00001-of-00004.safetensors"
    tensors = load_file(short / name)
    tensors.popitem()
    save_file(tensors, short / name, metadata={"format": "pt"})
    (tmp_path / "empty").mkdir()
    [line] = refusals("push", tmp_path / "nowhere", REPO)
    assert line == f"hf_zero: there is no folder {tmp_path / 'nowhere'}."
    [line] = refusals("push", plain / "config.json", REPO)
    assert "config.json" in line and "a file" in line
    for folder, said in (
        (tmp_path / "empty", "holds no model.safetensors"),
        (damaged, "rank-00001-of-00002.safetensors differs from the contents"),
        (short, "is missing"),
    ):
        [line] = refusals("push", folder, REPO)
        assert line.startswith(f"hf_zero: {folder} has faults, so nothing was pushed: ") and said in line
    edited = Path(shutil.copytree(trained(3)[0], tmp_path / "edited"))
    with (edited / "config.json").open("a") as opened:
        opened.write("\n")
    [line] = refusals("push", edited, REPO)
    assert "config.json" in line and f"run `hf-zero verify --accept {edited}` and push again" in line
    assert server.requests == []


def test_an_offline_client_says_so(plain, server, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    [line] = refusals("push", plain, REPO)
    assert line == (f"hf_zero: this push committed nothing to {REPO}: HF_HUB_OFFLINE is set; unset it to push.")


PUSHES = """
import sys

# The client, and what has imported it, read the environment when they are imported: anew in this forked process.
for name in list(sys.modules):
    if name.startswith(("huggingface_hub", "hf_zero.hub", "hf_zero.cli")):
        del sys.modules[name]

from hf_zero.cli.app import main

checkpoint, *repos = sys.argv[1:]
for repo in repos:
    sys.argv[1:] = ["push", checkpoint, repo]
    try:
        main()
    except SystemExit as end:
        print("ended with", end.code or 0)
"""


@pytest.mark.parametrize(
    ("fault", "ends"),
    [
        ("echoed by the second", [0, 1]),
        pytest.param("refused", [1], marks=pytest.mark.slow),
        pytest.param("broken", [1], marks=pytest.mark.slow),
    ],
)
def test_no_token_is_ever_shown_or_sent_with_the_files(fault, ends, trained, tmp_path):
    with HubServer() as server:
        if fault == "refused":
            server.tokens.clear()
        if fault == "echoed by the second":
            server.fail(rf"POST .*{REPO}-1/commit/", status=403, message=f"token {TOKEN} may not write")
        if fault == "broken":
            server.fail(r"GET .*/tree/[0-9a-f]{40}", status=403, times=99, message=f"what {TOKEN} wants")
        environment = os.environ | {
            "HF_ENDPOINT": server.url,
            "HF_TOKEN": TOKEN,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_VERBOSITY": "debug",
            "HF_DEBUG": "1",
        }
        script = tmp_path / "pushes.py"
        script.write_text(PUSHES)
        words = [trained(3)[0], *(f"{REPO}-{number}" for number in range(len(ends)))]
        done = run_forked(script, words, environment=environment, processes=1)
        assert re.findall(r"ended with (.*)", done.stdout) == list(map(str, ends)), done.stderr
        # The broken one has committed its files, and could not read them back.
        assert (f"{REPO}-0" in server.repos) == (fault != "refused")
        assert "Request" in done.stderr, "the client's own log is among what is searched"
        assert TOKEN not in done.stdout + done.stderr
        for repo in server.repos.values():
            assert all(TOKEN.encode() not in file.content for tree in repo.commits.values() for file in tree.values())


# ---- the card ----


def front_matter(text: str) -> str:
    return re.match(r"---\n(.*?)\n---\n", text, flags=re.DOTALL)[1]


def test_the_card_tells_what_the_run_wrote_and_no_more(trained, server):
    checkpoint, _ = trained(3)
    assert hf_zero("push", checkpoint, REPO).exit_code == 0
    card = server.files(REPO)["README.md"].decode()
    assert server.files(REPO)["loss.png"].startswith(b"\x89PNG")
    logged = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    for line in (
        "# model",
        "| architecture | BertForSequenceClassification |",
        "| training rows | 240 |",
        f"| training loss, last logged | {logged[-1]['loss']:.6g} |",
        "| learning_rate | 0.001 |",
        "| stage | 3 |",
        "| ranks | 2 |",
        f"| torch | {importlib.metadata.version('torch')} |",
        f"| 1 | {logged[0]['loss']:.4f} |",
        "![training loss by step](loss.png)",
    ):
        assert line in card.splitlines(), line
    assert f"| peak memory of the first rank, MiB | {max(entry['zero/peak_mib'] for entry in logged):.6g} |" in card
    assert "hf-zero" in front_matter(card) and "base_model" not in card and "eval_" not in card
    assert str(checkpoint.parent) not in card


def test_a_folder_that_knows_little_has_a_card_that_says_little(plain, server):
    assert hf_zero("push", plain, REPO).exit_code == 0
    card = server.files(REPO)["README.md"].decode()
    assert "| parameters |" in card
    for heading in ("Data", "Metrics", "Hyper-parameters", "ZeRO set-up", "Hardware", "Measured", "Versions", "Loss"):
        assert f"## {heading}" not in card
    assert "None" not in card and "loss.png" not in server.files(REPO)


def test_what_a_run_calls_its_things_cannot_break_the_card(trained, tmp_path):
    folder = Path(shutil.copytree(trained(3)[0], tmp_path / "odd"))
    run_file = folder / "training_run.json"
    said = json.loads(run_file.read_text())
    said["data"] = {"dataset": "a|b\n\n# heading <script>", "{{ 1 + 1 }}": "[x](y)"}
    said["data"] |= {"\x1b]0;title\x07": "\x1b[31mred\x1b[0m \x9b2J \u202eabc \x00", "long": "x" * 5000}
    config, state = (json.loads((folder / name).read_text()) for name in ("config.json", "trainer_state.json"))
    config["architectures"] = ["\x1b[31mBert"]
    state["log_history"] = [{"step": step, "loss": loss} for step, loss in ((1, 1e308), (2, -1e308), (2**62, 5e-324))]
    state["log_history"][0]["eval_\x1b[2J"] = "\x1b[2J"
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "trainer_state.json").write_text(json.dumps(state))
    said["base_model"] = "../../nowhere: [x"
    run_file.write_text(json.dumps(said))
    assert make_card(folder)
    card = (folder / "README.md").read_text()
    assert "| dataset | `a`&#124;`b # heading <script>` |" in card
    assert "| `{{ 1 + 1 }}` | `[x](y)` |" in card
    assert "nowhere" not in card
    # Not a sign that a terminal obeys, as `cat` or `less` would show it.
    assert card.replace("\n", "").isprintable() and r"| `\x1b[31mred\x1b[0m \x9b2J \u202eabc \x00` |" in card
    assert max(map(len, card.splitlines())) < 1200
    run_file.write_text("{")
    with pytest.raises(CheckpointError, match=r"training_run.json is damaged"):
        make_card(folder)


ACTIVE = (
    "x [click](http://evil.example/)",
    "x \\[click](http://evil.example/)",
    *(
        r"a\| b",
        r"a\`code",
        "a|b",
        "|",
        "` `` ```",
        "``x``|`",
        "**b** __b__ *i* _i_ ~~s~~ ==m== ^s^ ++i++",
        "\\",
        "`",
        " | x | ",
    ),
    *(
        "<http://evil.example> <a href=x>y</a> <script>",
        "<!-- x",
        "-->",
        "&lt;b&gt; &#91;x&#93;(y)",
        "![x](http://evil/p.png)",
    ),
    *(
        "http://evil.example www.evil.example evil.example a@evil.example //evil.example",
        "[x]: http://evil.example",
        "[^1]",
    ),
    *(
        "# x",
        "---",
        "- x",
        "1. x",
        "> x",
        "===",
        "$$x$$ \\(x\\)",
        ":smile: @user #1",
        "a_b _c d_ 1.2.3 x.y",
        "(c) 50 % --x",
    ),
    *(
        "x\n\n[a](b)",
        "x\n---\nlicense: mit\n---\n# y",
        "\x1b]8;;http://evil\x07x",
        "\u202etxt.exe",
        "{{ ours }} {% raw %}",
    ),
)

VALUES = st.text(st.sampled_from("ab1 \\`*_{}[]()<>#+-.!|~&;:/@$^=\"'\n\x1b\u202e")) | st.text()


def texts_of(card: str) -> list[str]:
    """The title and all cells of a card's first table, as a renderer shows them; nothing in them may be active."""
    tokens = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).parse(card)
    title = tokens[[token.type for token in tokens].index("heading_open") + 1]
    cells = [tokens[at + 1] for at, token in enumerate(tokens) if token.type == "td_open"]
    for token in (title, *cells):
        assert {child.type for child in token.children} <= {"text", "code_inline"}, token
    return ["".join(child.content for child in token.children) for token in (title, *cells)]


def card_of(names: list[str], title: str, **metadata: object) -> str:
    nothing = {each.name: {} for each in fields(CardFacts)} | {"base_model": None, "losses": (), "eval_losses": ()}
    facts = CardFacts(**nothing | {"data": {name: name for name in names}})
    return model_card.render(facts, name=title, metadata=metadata, drawn=False)


def as_shown(value: str) -> str:
    return printed(" ".join(value.split()), model_card._LONGEST_CELL)


@given(names=st.lists(VALUES, min_size=1), title=VALUES)
@example(names=list(ACTIVE), title="x [click](y)")
def test_no_text_of_a_run_is_active_in_the_card(names, title):
    expected = [title, *(name for name in dict.fromkeys(names) if name for _ in range(2))]
    assert texts_of(card_of(names, title).split("---\n", 2)[2]) == list(map(as_shown, expected))


@pytest.mark.parametrize("value", ACTIVE)
def test_no_text_ends_the_front_matter_of_a_card(value):
    card = card_of([value], value, license=value, tags=[value], finetuned=value)
    said = yaml.safe_load(front_matter(card))
    assert said == {"library_name": "transformers", "license": value, "tags": [value, "hf-zero"], "finetuned": value}


@pytest.mark.parametrize(
    "value", ["bert-base", "per_device_train_batch_size", "2.11.0+cpu", "CPU (x86_64), 2 ranks", "1e-08"]
)
def test_plain_names_and_numbers_stay_plain_in_the_card(value):
    assert f"| {value} | {value} |" in card_of([value], value)


def test_a_card_by_hand_stays_here_and_on_the_hub(plain, server):
    (plain / "README.md").write_text("# by hand\n")
    assert hf_zero("push", plain, REPO).exit_code == 0
    assert server.files(REPO)["README.md"] == b"# by hand\n"
    assert not make_card(plain)
    # Without a card here, one is made; it does not replace the one over there.
    (plain / "README.md").unlink()
    assert hf_zero("push", plain, REPO).exit_code == 0
    assert server.files(REPO)["README.md"] == b"# by hand\n"
    assert not (plain / "README.md").exists()


def test_a_picture_is_readable_on_light_and_dark_pages_and_shows_a_single_point(tmp_path):
    from matplotlib.image import imread

    assert model_card._draw(SimpleNamespace(losses=((1, 2.0),), eval_losses=()), tmp_path / "loss.png")
    pixels = imread(tmp_path / "loss.png")
    opaque = pixels[..., 3] > 0.9
    assert not pixels[0, 0, 3] and opaque.any()
    # What is drawn differs from a white page and from a dark one.
    grays = pixels[..., :3].mean(axis=-1)[opaque]
    assert grays.min() > 0.2 and grays.max() < 0.8
    # The dot is the only thing in color, left of the legend.
    in_color = opaque & (np.ptp(pixels[..., :3], axis=-1) > 0.3)
    columns = np.flatnonzero(in_color.any(axis=0))
    dot, legend = np.split(columns, np.flatnonzero(np.diff(columns) > 50)[:1] + 1)
    assert len(dot) >= 5 and len(legend)


def test_without_matplotlib_the_card_says_that_a_picture_is_missing(trained, tmp_path, monkeypatch):
    folder = Path(shutil.copytree(trained(3)[0], tmp_path / "bare"))
    monkeypatch.setattr("hf_zero.hub.card.find_spec", lambda name: None)
    assert make_card(folder)
    card = (folder / "README.md").read_text()
    assert "matplotlib was missing" in card and "loss.png" not in card and not (folder / "loss.png").exists()


def test_the_template_at_the_top_is_the_one_that_is_installed():
    top = Path(__file__).resolve().parents[2] / "model_cards" / "template.md"
    assert top.read_text() == TEMPLATE.read_text()


# ---- Trainer ----


def no_room(checkpoint: Path, out: Path) -> None:
    out.mkdir()
    (out / "begun").touch()
    raise OSError(28, "full")


def trains_and_pushes(rank: int, world_size: int, url: str, door: str, output_dir: str, **overrides: object) -> dict:
    as_launched(rank, world_size)
    talk_to(url)
    upload.WAITS_S = (0.02, 0.02, 0.02)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("transformers").addHandler(handler)
    logging.getLogger("hf_zero").addHandler(handler)
    final = overrides.pop("final_push", False)
    if overrides.pop("full_disk", False):
        trainer_push.stage_checkpoint = no_room
    trainer = make_trainer(door, "bert", output_dir, **SAVING, push_to_hub=True, hub_token=TOKEN, **overrides)
    trainer.train()
    error = None
    try:
        pushed = trainer.push_to_hub(blocking=final != "later", dataset="ten|plus", language="en") if final else None
        if final == "later":
            pushed = pushed.result(timeout=60)
    except HubError as failure:
        pushed, error = None, str(failure)
    state = trainer.model.state_dict()
    return {
        "state": {name: value.float().tolist() for name, value in state.items()},
        "said": said,
        "pushed": pushed is not None,
        "error": error,
    }


def push_from_ranks(world_size: int, **arguments: object) -> list[dict]:
    return run_on_ranks(trains_and_pushes, world_size=world_size, **arguments)


@pytest.mark.parametrize(
    ("world_size", "settings"),
    short_rows(
        [(1, "2"), (2, "1"), (2, "stage=3,checkpoint.layout=sharded")], [(2, "stage=3,checkpoint.layout=sharded")]
    ),
)
def test_trainer_pushes_the_model_of_each_checkpoint_and_the_last(world_size, settings, server, tmp_path):
    output_dir = tmp_path / "model"
    outcomes = push_from_ranks(
        world_size,
        url=server.url,
        door=f"flag {settings}",
        output_dir=str(output_dir),
        hub_always_push=True,
        final_push=True,
        save_total_limit=1,
    )
    assert [outcome["pushed"] for outcome in outcomes] == [True] + [False] * (world_size - 1)
    assert all(outcome["error"] is None for outcome in outcomes)
    repo = server.repos[REPO]
    assert repo.messages[1:] == ["Training in progress, step 2", "Training in progress, step 4", "End of training"]
    for tree in repo.commits.values():
        assert not [path for path in tree if path.startswith(("zero", "optimizer", "checkpoint", "training", ".tmp"))]
    assert weights_of(downloaded(server, tmp_path / "down")) == outcomes[0]["state"]
    card = server.files(REPO)["README.md"].decode()
    assert "| dataset | `ten`&#124;`plus` |" in card.splitlines() and "| samples a second |" in card
    assert "language: en" in front_matter(card)
    assert not list(output_dir.glob(".tmp-*"))
    assert TOKEN not in "".join(outcomes[0]["said"]) + card


@pytest.mark.slow
def test_the_last_model_alone_is_pushed_behind_the_script_where_that_is_asked(server, tmp_path):
    arguments = {"url": server.url, "door": "flag 2", "output_dir": str(tmp_path / "model")}
    [outcome] = push_from_ranks(1, **arguments, hub_strategy="end", final_push="later", hub_private_repo=True)
    assert outcome["pushed"] and server.repos[REPO].private
    assert server.repos[REPO].messages[1:] == ["End of training"]
    assert weights_of(downloaded(server, tmp_path / "down")) == outcome["state"]


@pytest.mark.slow
def test_a_checkpoint_goes_along_where_the_strategy_says_so_and_can_be_resumed_from(server, tmp_path):
    push_from_ranks(
        2,
        url=server.url,
        door="flag 3",
        output_dir=str(tmp_path / "model"),
        hub_strategy="checkpoint",
        hub_always_push=True,
    )
    down = downloaded(server, tmp_path / "down")
    files = server.files(REPO)
    assert any(path.startswith("last-checkpoint/zero/rank-00001") for path in files)
    assert not any(path.endswith("training_args.bin") for path in files)
    assert TOKEN.encode() not in b"".join(files.values())
    assert checkpoint_faults(down / "last-checkpoint", "zero") == []
    assert weight_faults(down / "last-checkpoint") == []
    arguments = {"door": "flag 2", "model": "bert", "output_dir": str(tmp_path / "again"), **SAVING, "max_steps": 6}
    arguments["resume"] = str(down / "last-checkpoint")
    outcome = run_on_ranks(run, **arguments)[0]
    assert len(outcome["losses"]) == 6


def begins(rank: int, world_size: int, url: str, output_dir: str, **overrides: object) -> str:
    as_launched(rank, world_size)
    talk_to(url)
    with pytest.raises(HubError) as refused:
        make_trainer("flag 2", "bert", output_dir, push_to_hub=True, **overrides)
    return str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"hub_model_id": "a/b/c", "hub_token": TOKEN}, "'a/b/c' is not a valid repository name"),
        ({"hub_model_id": "somebody/model", "hub_token": TOKEN}, "403: You don't have the rights"),
        ({"hub_model_id": REPO, "hub_token": "hf_AnotherFakeTokenThatNobodyAccepts"}, "does not accept the token"),
    ],
    ids=["name", "owner", "token"],
)
def test_trainer_says_in_one_line_why_it_could_not_push_before_it_trains(overrides, said, server, tmp_path):
    [line] = run_on_ranks(begins, world_size=1, url=server.url, output_dir=str(tmp_path / "model"), **overrides)
    assert line.startswith("hf_zero: ") and said in line and "\n" not in line
    assert overrides["hub_token"] not in line


@pytest.mark.slow
def test_a_push_that_cannot_be_made_ready_is_told_and_training_goes_on(server, tmp_path):
    outcomes = push_from_ranks(
        2, url=server.url, door="flag 3", output_dir=str(tmp_path / "model"), full_disk=True, hub_strategy="checkpoint"
    )
    told = [line for line in outcomes[0]["said"] if "could not be prepared for the Hub ([Errno 28] full)" in line]
    assert len(told) == 2
    assert (tmp_path / "model" / "checkpoint-4").is_dir() and server.put == []
    assert not list((tmp_path / "model").glob(".tmp-*"))


def test_a_push_that_arrives_otherwise_is_told_and_training_goes_on(server, tmp_path):
    server.corrupt("model.safetensors", flip)
    [outcome] = push_from_ranks(
        1, url=server.url, door="flag 2", output_dir=str(tmp_path / "model"), final_push=True, hub_always_push=True
    )
    told = [
        line
        for line in outcome["said"]
        if "differs from the pushed files: model.safetensors has a different sha256" in line
    ]
    assert len(told) == 2 and all("Training is not affected." in line for line in told)
    assert "differs from the pushed files: model.safetensors has a different sha256" in outcome["error"]
    assert (tmp_path / "model" / "checkpoint-4").is_dir()


def test_a_folder_that_changes_while_it_is_pushed_is_found_out(plain, server, monkeypatch):
    whole = server.take_fault

    def changes(line: str) -> None:
        if "/commit/" in line:
            (plain / "config.json").write_text("{}")
        return whole(line)

    monkeypatch.setattr(server, "take_fault", changes)
    with pytest.raises(HubError, match=r"config\.json has a different git-sha1 there"):
        push_folder(plain, Destination(repo_id=REPO), api=api_of(server), message="changes")


class WritesItsCardFirst(Trainer):
    """As TRL's trainers do."""

    def _save_checkpoint(self, model, trial):
        self.create_model_card(model_name="first")
        super()._save_checkpoint(model, trial)


def writes_cards(rank: int, world_size: int, folder: str) -> None:
    as_launched(rank, world_size)
    make_trainer("flag 2", "gpt2", folder, trainer_class=WritesItsCardFirst, **SAVING).train()


def test_a_card_may_be_written_before_the_first_save(tmp_path):
    run_on_ranks(writes_cards, folder=str(tmp_path))
    assert (tmp_path / "README.md").is_file() and checkpoint_faults(tmp_path / "checkpoint-4", "zero") == []
