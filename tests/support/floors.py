"""The floor that each room of hf_zero is on: a file imports its own floor or those below it."""

FLOOR = {
    "config": 0,
    "layout": 0,
    "device": 0,
    "read_ahead": 0,
    "kernels": 1,
    "plan": 1,
    "comm": 2,
    "checkpoint": 2,
    "offload": 3,
    "engine": 4,
    "diagnose": 5,
    "report": 5,
    "integrations": 6,
    "run": 7,
    "cli": 7,
}
