"""Numbers as people read them, with their units."""

import math


def shown_bytes(nbytes: float) -> str:
    """1536 → "1.5 KiB"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= size:
            return f"{shown(nbytes / size)} {unit}"
    return f"{round(nbytes)} B"


def shown_seconds(seconds: float) -> str:
    """0.0042 → "4.2 ms", 4000 → "1 h 7 min"."""
    if not seconds < 1e12:
        return f"{seconds:.3g} s" if math.isfinite(seconds) else str(seconds)
    if seconds < 1e-3:
        return f"{shown(1e6 * seconds)} µs"
    if seconds < 1:
        return f"{shown(1e3 * seconds)} ms"
    if seconds < 60:
        return f"{shown(seconds)} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        whole, rest = divmod(round(seconds), 60)
        return f"{whole} min {rest} s" if rest else f"{whole} min"
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest} min" if rest else f"{hours} h"


def shown(value: float) -> str:
    """Three figures that count, without an exponent where it is avoidable: 1234.5 → "1,234", 4 → "4.00"."""
    if not math.isfinite(value):
        return str(value)
    magnitude = abs(value)
    if magnitude >= 1e9:
        return f"{value:.3g}"
    if magnitude >= 100:
        return f"{value:,.0f}"
    if magnitude >= 10:
        return f"{value:.1f}"
    if magnitude >= 1:
        return f"{value:.2f}"
    if magnitude >= 1e-4 or magnitude == 0:
        return f"{value:.3g}"
    return f"{value:.2e}".replace("e-0", "e-")


def shown_tick(value: float, size: float) -> str:
    """A round value of an axis, with as many decimals as its neighbours, which are `size` apart."""
    if not value:
        return "0"
    if abs(value) >= 1e9 or size < 1e-4:
        # As many figures as tell neighbours apart: 2e-5, 1.5e-5.
        places = max(0, math.floor(math.log10(abs(value)) + 1e-9) - math.floor(math.log10(size) + 1e-9))
        figures, _, power = f"{value:.{places}e}".partition("e")
        return f"{figures}e{int(power)}"
    return f"{value:,.{max(0, -math.floor(math.log10(size) + 1e-9))}f}"


def shown_count(count: int) -> str:
    """1234567 → "1.23 million"."""
    for word, size in (("billion", 10**9), ("million", 10**6)):
        if count >= size:
            return f"{shown(count / size)} {word}"
    return f"{count:,}"


def shown_share(part: float, whole: float) -> str:
    """A part in percent."""
    if not whole:
        return "0 %"
    percent = 100 * part / whole
    return f"{percent:.0f} %" if percent >= 10 else f"{percent:.1f} %" if percent >= 0.05 else "0 %"


def several(count: int, what: str) -> str:
    """ "1 step", "3 steps"."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
