"""GRPO that explores by mixed input embeddings (N-GRPO, arXiv:2606.10768)."""

from harness.arms.grpo import GRPO
from harness.parts.mixing import NeighbourMixing
from harness.parts.sampling import FixedGroups

N_GRPO = GRPO.but(
    "n_grpo",
    source="N-GRPO arXiv:2606.10768: grpo with neighbours' embeddings mixed in while sampling",
    sampling=FixedGroups(mixing=NeighbourMixing(neighbours=3, share=0.1)),
)
