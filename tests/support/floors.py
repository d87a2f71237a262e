"""The floor that each room of hf_zero is on: a file imports its own floor or those below it."""

FLOOR = {
    "config": 0,
    "layout": 0,
    "device": 0,
    "hooks": 0,
    "disguise": 0,
    "kernels": 1,
    "forecast": 1,
    "comm": 2,
    "checkpoint": 2,
    "foreign": 3,
    "offload": 3,
    "buckets": 4,
    "optimizer": 5,
    "engine": 6,
    "diagnose": 7,
    "report": 7,
    "planner": 8,
    "integrations": 8,
    "run": 9,
    "cli": 9,
}
