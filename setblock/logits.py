"""What an architecture does to the logits of its output layer: it scales them, or caps them.

A network does so in its own forward. Who calls the output layer alone, for a chain or for the
scores of labels, has to do the same.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

# The settings that say how much, None or 1 where nothing is done.
CAP, CAP_IN_32_BITS = "final_logit_softcapping", ("beam",)
SCALES = ("logits_scaling", "logit_scale", "lm_head_multiplier")
# Of these one is divided by, but in networks of these kinds.
DIVISOR, NO_DIVISOR = "logits_scaling", ("hyperclovax",)


def after_head(config: Any) -> Callable[[Tensor], Tensor]:
    """What makes a network's logits of its output layer's."""
    name, value = _change(config)
    if name is None:
        return lambda logits: logits
    if name == CAP and config.model_type in CAP_IN_32_BITS:
        return lambda logits: (logits.float() / value).tanh() * value
    if name == CAP:
        return lambda logits: (logits / value).tanh() * value
    if name == DIVISOR and config.model_type not in NO_DIVISOR:
        return lambda logits: logits / value
    return lambda logits: logits * value


def changes(config: Any) -> bool:
    """Whether a setting says so."""
    return _change(config)[0] is not None


@contextmanager
def left_alone(network: Any) -> Iterator[None]:
    """Within, the network's own forward returns what its output layer says."""
    name, value = _change(network.config)
    if name is None:
        yield
        return
    # Whichever module has copied it, behind whatever peft has put around the network.
    told = [one for one in (network.config, *network.modules()) if vars(one).get(name) == value]
    for one in told:
        setattr(one, name, None if name == CAP else 1.0)
    try:
        yield
    finally:
        for one in told:
            setattr(one, name, value)


def _change(config: Any) -> tuple[str | None, Any]:
    """(the setting, its value); None where logits stay as they are."""
    # Settings alone: a property of such a name, MiniCPM3's, tells of what its output layer reads.
    values = ((name, vars(config).get(name)) for name in (CAP, *SCALES))
    return next(((name, value) for name, value in values if value not in (None, 1)), (None, None))
