"""Sequences computed by several ranks together (`sp_size`): memory, bytes, and a sequence too long for one rank.

    python scripts/bench/sequence.py            # peaks and bytes of a Llama at 8,192 tokens on 1, 2 and 4 gloo ranks
    python scripts/bench/sequence.py --long     # 131,072 tokens on 2 ranks, under a limit that one rank meets: minutes
    python scripts/bench/sequence.py --quick    # a short sequence: does the harness run?

Peaks are resident bytes of a step above the bytes before, with parameters and gradients allocated: activations, logits, and
exchange buffers. The planner's forecast of activations and logits is shown next to them. Bytes of a forward and a backward
without
a step are shown as counted by sockets and by the ledger, next to their formula: each layer has four exchanges in forward and
again in backward, of a rank's part of each tensor.
"""

from __future__ import annotations

import resource
from typing import Any

import torch
from harness import Column, describe_run, held_before, keep, most_held, on_ranks, print_table, read_options, spent_in

_MIB = 2**20
_EXCHANGE = "all-to-all of heads"


def _model(sizes: dict[str, int]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=0, eos_token_id=0)).train()


def _engine(model: Any, ranks: int) -> Any:
    from hf_zero import ZeroEngine
    from hf_zero.sequence.parallel import enable_sequence_parallel

    engine = ZeroEngine(model, [torch.optim.SGD(model.parameters(), lr=1e-3)], 2)
    if ranks > 1:
        enable_sequence_parallel(engine, ranks)
    return engine


def measure(rank: int, world_size: int, *, sizes: dict[str, int], tokens: int) -> dict[str, Any]:
    """Returns one rank's peak and bytes, and the planner's forecast of both."""
    from hf_zero.planner.trace import trace

    model = _model(sizes)
    engine = _engine(model, world_size)
    ids = torch.randint(sizes["vocab_size"], (1, tokens), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    traced = trace(model, batch, shape="", tokens=tokens // world_size, sp_size=world_size)
    found: dict[str, Any] = {"forecast": traced.peak_bytes, "exchange_forecast": traced.exchanged_bytes}

    def step() -> None:
        loss = model(**batch).loss
        loss.backward()
        found["loss"] = loss.item()

    # The first passes compare batches, and allocate lasting buffers.
    for _ in range(2):
        step()
        engine.optimizers[0].optimizer.zero_grad()
    before = held_before(trims=True)
    step()
    found["peak"] = most_held() - before
    engine.optimizers[0].optimizer.zero_grad()
    if world_size > 1:
        rows_before = {row.kind: row.bytes_sent for row in engine.comm_report().rows}
        found["socket"] = spent_in(step).sent_bytes
        rows = {row.kind: row.bytes_sent - rows_before.get(row.kind, 0) for row in engine.comm_report().rows}
        found["exchanged"], found["other"] = rows[_EXCHANGE], sum(rows.values()) - rows[_EXCHANGE]
    engine.close()
    return found


def formula(sizes: dict[str, int], tokens: int, ranks: int) -> int:
    """Returns the bytes sent by a rank in the exchanges of one forward and backward, in fp32."""
    width = sizes["hidden_size"] // sizes["num_attention_heads"]
    heads, pairs = sizes["num_attention_heads"], max(sizes["num_key_value_heads"], ranks)
    a_layer = tokens // ranks * width * (2 * heads + 2 * pairs) * 4
    return 2 * sizes["num_hidden_layers"] * a_layer * (ranks - 1) // ranks


def one_step(rank: int, world_size: int, *, sizes: dict[str, int], tokens: int, limit: int) -> dict[str, Any]:
    """Runs a step under a limit of private memory (`ulimit -d`), counted in addition to the memory before the model."""
    held = held_before()
    data = _data_bytes()
    resource.setrlimit(resource.RLIMIT_DATA, (data + limit, data + limit))
    model = _model(sizes)
    engine = _engine(model, world_size)
    ids = torch.randint(sizes["vocab_size"], (1, tokens), generator=torch.Generator().manual_seed(0))
    try:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    except (MemoryError, RuntimeError) as error:
        if "memory" not in str(error):
            raise
        return {"loss": None, "peak": most_held() - held, "error": str(error).splitlines()[0]}
    norm = engine.clip_grad_norm_(float("inf")).item()
    found = {"loss": loss.item(), "norm": norm, "peak": most_held() - held, "error": ""}
    engine.close()
    return found


def _data_bytes() -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        [line] = [line for line in status if line.startswith("VmData")]
    return int(line.split()[1]) * 1024


def main() -> None:
    options = read_options(
        __doc__,
        quick={"tokens": 512, "ranks": [1, 2]},
        tokens=8192,
        ranks=[1, 2, 4],
        long=False,
        long_tokens=131072,
        limit_mib=1400,
    )
    run = describe_run(options)
    if options.long:
        sizes = {"vocab_size": 1024, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
        sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
        arguments = {"sizes": sizes, "tokens": options.long_tokens, "limit": options.limit_mib * _MIB}
        rows = [{"ranks": n, **on_ranks(one_step, n, limit_s=3000, **arguments)[0]} for n in (1, 2)]
        columns = [
            Column("ranks", "ranks", "d"),
            Column("loss", lambda row: "did not fit" if row["loss"] is None else f"{row['loss']:.4f}", ""),
            Column("peak, MiB a rank", lambda row: row["peak"] / _MIB, ".0f"),
        ]
        print_table(
            f"{options.long_tokens} tokens under ulimit -d of {options.limit_mib} MiB above the start", columns, rows
        )
        keep("sequence_long", run, {"rows": rows}, options.json)
        return
    sizes = {"vocab_size": 4096, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    rows = []
    for ranks in options.ranks:
        found = on_ranks(measure, ranks, sizes=sizes, tokens=options.tokens)[0]
        rows.append({"ranks": ranks, "formula": formula(sizes, options.tokens, ranks), **found})
    for row in rows:
        row["of one"] = row["peak"] / rows[0]["peak"]
    columns = [
        Column("ranks", "ranks", "d"),
        Column("loss", "loss", ".6f"),
        Column("peak, MiB a rank", lambda row: row["peak"] / _MIB, ".1f"),
        Column("of one rank's", "of one", ".3f"),
        Column("forecast, MiB", lambda row: row["forecast"] / _MIB, ".1f"),
        Column("forecast / peak", lambda row: row["forecast"] / row["peak"], ".3f"),
        Column("exchanged, KiB", lambda row: row.get("exchanged", 0) / 1024, ".1f"),
        Column("formula, KiB", lambda row: row["formula"] / 1024, ".1f"),
        Column("at the socket, KiB", lambda row: row.get("socket", 0) / 1024, ".1f"),
        Column("gradients and the rest, KiB", lambda row: row.get("other", 0) / 1024, ".1f"),
    ]
    print_table(f"{options.tokens} tokens", columns, rows)
    keep("sequence", run, {"rows": rows}, options.json)


if __name__ == "__main__":
    main()
