"""DPO (Rafailov et al. 2023, arXiv:2305.18290) by TRL's trainer."""

from harness.external.arm import OfflineArm
from harness.parts.preference import KLInPreference, SigmoidLoss

DPO = OfflineArm(
    name="dpo",
    source="DPO arXiv:2305.18290 eq. 7, in TRL's DPOTrainer",
    kl=KLInPreference(kl_coef=0.1),
    preference=SigmoidLoss(),
)
