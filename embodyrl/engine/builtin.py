"""The optimisers, declared by name; nothing here imports torch."""

from __future__ import annotations

from embodyrl.registry import OPTIMIZERS, Requirement

OPTIMIZERS.register(
    "adamw",
    target="embodyrl.engine.adamw:adamw",
    summary="AdamW (Loshchilov & Hutter 2019); 8 bytes of moments for each weight",
)
OPTIMIZERS.register(
    "adamw_8bit",
    target="embodyrl.engine.adamw:adamw_8bit",
    requires=[Requirement(module="bitsandbytes", install="pip install 'embodyrl[bnb]'")],
    summary="AdamW with moments in 8 bits (Dettmers et al. 2022); 2 bytes of moments for each weight",
)
