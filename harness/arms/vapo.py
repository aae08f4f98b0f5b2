"""PPO whose critic is pre-trained and has a lambda of its own: VC-PPO and VAPO."""

from harness.arms.ppo import PPO
from harness.parts.advantage import GAE, LengthAdaptiveGAE
from harness.parts.clip import PPOClip
from harness.parts.critic import Critic
from harness.parts.imitate import Imitate
from harness.parts.kl import NoKL
from harness.parts.shaping import SignedScore

VC_PPO = PPO.but(
    "vc_ppo",
    source="VC-PPO arXiv:2503.01491: value pre-training, lambda 1 for the critic, less for the "
    "policy; scores +1/-1",
    shaping=(SignedScore(),),
    advantage=GAE(gae_lambda=0.95, critic_lambda=1.0, critic=Critic(warmup_steps=4)),
)

VAPO = VC_PPO.but(
    "vapo",
    source="VAPO arXiv:2504.05118: length-adaptive lambda, clip-higher, NLL of right answers",
    kl=NoKL(),
    advantage=LengthAdaptiveGAE(alpha=0.05, critic_lambda=1.0, critic=Critic(warmup_steps=4)),
    clip=PPOClip(clip_low=0.2, clip_high=0.28),
    imitate=Imitate(coef=0.1),
)
