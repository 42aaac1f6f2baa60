"""Which environment to step, on which engine, and how its episodes are shaped."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from unirl.errors import UniRLError
from unirl.host import usable_cores

EngineName = Literal["auto", "vector", "sync", "async", "envpool", "ale"]
MULTI_AGENT = "pettingzoo/"
"""How the ids of environments with several agents begin."""
SIM_FAMILIES = ("torch/", "warp/", "isaacgym/", "isaaclab/", "gymnasium/")
"""How the ids of simulators on a device begin (envs/sim)."""


@dataclass(frozen=True)
class EnvConfig:
    """One environment id and its settings; picklable, and every value has a form in TOML."""

    id: str = field(default="CartPole-v1", metadata={"common": True})
    """Gymnasium id ("CartPole-v1", "ALE/Pong-v5"). With engine "envpool" it is looked up in
    EnvPool's list; Atari games are written "ALE/Pong-v5" there too, though EnvPool itself lists
    them as "Pong-v5".

    Environments with several agents begin with "pettingzoo/", and each agent is a row: num_envs
    counts rows and is a multiple of the number of agents. "pettingzoo/classic/rps_v2" is the
    parallel_env of module pettingzoo.classic.rps_v2, "pettingzoo/unirl/Duel" a game of UniRL, and
    "pettingzoo/my_package.games:make_tag" whatever make_tag(**env.kwargs) of module
    my_package.games returns, if it has PettingZoo's parallel API.

    Simulators that step thousands of environments on one device begin with "torch/", "warp/",
    "isaacgym/", "isaaclab/" or "gymnasium/". Their engine is auto; samplers of the host step them
    on the CPU.
    """
    engine: EngineName = field(default="auto", metadata={"common": True})
    """What steps the environments. auto: ale for ALE/*, else the env's own vector class where it
    registers one, else sync. Environments with several agents know auto and sync, which are one.

    vector: the env's own vector class, fastest where it exists. sync: one after the other in this
    process. async: one process per environment, pays off only where a step costs far more than
    100 microseconds. envpool, ale: C++ threads.
    """
    num_threads: int = 0
    """Threads of ale and envpool. More: more cores per actor; 0: one per usable core."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to the environment's constructor; with ale and envpool to the engine's, where they win
    over the fields below. Of a simulator: the task's settings."""
    max_episode_steps: int | None = None
    """Agent steps after which an episode is truncated. More: longer episodes; None: the id's own
    limit."""
    step_timeout: float = 300.0
    """Seconds that one step or reset may take in another process (engine async, environment
    workers) before that process is replaced, and in an evaluation before it ends. More: slower to
    notice what hangs. An actor process that does not finish an unroll within runner.hang_seconds is
    replaced whatever this says."""
    make_timeout: float = 120.0
    """Seconds that making the environments of one group or actor may take, and as long again their
    first reset. More: slower to notice one that hangs there."""
    random_burst_probability: float = 0.0
    """Chance per step that a training environment begins a burst: for a few steps it executes one
    random action, whatever the policy chooses. More: more states are known, lower training returns.
    Evaluations have no bursts."""
    random_burst_steps: tuple[int, int] = (3, 12)
    """Fewest and most steps of a burst. More: it leads farther away."""
    last_action: bool = False
    """Observations get an entry "last_action", and "obs" if they were no Dict. Where actions may be
    repeated or have inertia, one observation does not show what comes next.
    """
    action_mask: str = "auto"
    """Which actions are allowed where: "info" reads info["action_mask"] (as Gymnasium's Taxi gives
    it), the name of an entry of the observations that entry (PettingZoo's classic games:
    "action_mask"). Actions that are not allowed get probability 0 in acting, learning and
    evaluations, and networks do not read the mask. auto: an entry "action_mask" where there is one,
    else the info's, if the first reset gives one (one environment is reset once, to see). none: no
    mask.
    """
    drop_observations: tuple[str, ...] = ()
    """Entries of Dict observations that are left out, in levels as "a/b": what no network can read,
    such as a "mission" in words. Texts of at most 256 characters can be read.
    """
    import_module: str = ""
    """Module imported first, in every process; it registers custom environments ("my_envs")."""

    frame_skip: int = 4
    """Atari only: frames per agent step; the last two are max-pooled. More: coarser control, more
    frames per second."""
    frame_stack: int = 4
    """Atari only: frames per observation, the leading axis. More: longer memory, larger slots."""
    frame_size: int = 84
    """Atari only: height and width of an observation. More: small things are seen more exactly, and
    acting, learning and slots cost more with its square. Torsos read nothing smaller than 9
    (nature) or 5 (shallow) times policy.image_stride."""
    repeat_action_probability: float = 0.25
    """Atari only: chance per frame that the previous action is repeated (sticky actions). More:
    more stochastic."""
    noop_max: int = 30
    """Atari only: an episode begins with up to this many frames of no-op. More: more varied
    starts."""
    episodic_life: bool = False
    """Atari only: True ends an episode (terminated) at each lost life; the game itself continues in
    the next episode."""
    full_action_space: bool = False
    """Atari only: True offers all 18 actions instead of the game's minimal set."""

    def __post_init__(self) -> None:
        if self.engine not in get_args(EngineName):
            raise UniRLError(
                f"env.engine {self.engine!r} is unknown",
                f"env.engine must be one of {', '.join(get_args(EngineName))}",
                "set env.engine to auto",
            )
        if not self.id:
            raise UniRLError(
                "the environment has no id", 'env.id must be a name, found ""', "set env.id"
            )
        if self.is_multi_agent and self.engine not in ("auto", "sync"):
            raise UniRLError(
                f'env.engine {self.engine} cannot run env "{self.id}"',
                "environments with several agents are stepped one after the other: auto or sync",
                "set env.engine to auto; environment workers step them in several processes",
            )
        if self.is_sim:
            self._check_sim()
        if self.import_module.startswith("."):
            raise UniRLError(
                f'env.import_module "{self.import_module}" is relative',
                "env.import_module must be a full name such as my_package.envs",
                "write it without leading dots, and set PYTHONPATH to its folder",
            )
        for name, remedy in (
            ("repeat_action_probability", "0.25 is what v5 ids use"),
            ("random_burst_probability", "with 0.01 a burst begins every hundred steps"),
        ):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                rule = f"0 <= env.{name} <= 1 must hold"
                raise UniRLError(f"env.{name} {value} is not a probability", rule, remedy)
        if not 1 <= self.random_burst_steps[0] <= self.random_burst_steps[1]:
            raise UniRLError(
                f"env.random_burst_steps {self.random_burst_steps} is no range",
                "it must be (fewest, most) with 1 <= fewest <= most",
                "(3, 12) is the default",
            )
        minimum = dict.fromkeys(("frame_skip", "frame_stack", "frame_size"), 1)
        minimum |= dict.fromkeys(("num_threads", "noop_max"), 0)
        if self.max_episode_steps is not None:
            minimum["max_episode_steps"] = 1
        for name, least in minimum.items():
            if getattr(self, name) < least:
                raise UniRLError(
                    f"env.{name} of {getattr(self, name)} is too small",
                    f"env.{name} must be at least {least}",
                    f"set env.{name.replace('_', '-')} to {least} or more",
                )
        for name, verb, usual in (("step_timeout", "step", 300), ("make_timeout", "be made", 120)):
            if (value := getattr(self, name)) <= 0:
                raise UniRLError(
                    f"env.{name} of {value} leaves no time to {verb}",
                    f"env.{name} must be positive",
                    f"{usual} is the default",
                )

    def _check_sim(self) -> None:
        """Simulators on a device step all their environments themselves."""
        for name, value, only, why in (
            ("engine", self.engine, "auto", "so only auto fits"),
            ("random_burst_probability", self.random_burst_probability, 0.0, "without bursts"),
            ("last_action", self.last_action, False, "and write their observations"),
            ("drop_observations", list(self.drop_observations), [], "and write their observations"),
            ("action_mask", self.action_mask.replace("auto", "none"), "none", "without masks"),
        ):
            if value != only:
                raise UniRLError(
                    f'env.{name} {value} does not fit env "{self.id}"',
                    f"simulators on a device step all their environments themselves, {why}",
                    f"set env.{name} to {str(only).lower()}",
                )

    def check_num_envs(self, num_envs: int) -> None:
        if num_envs < 1:
            raise UniRLError(
                f'{num_envs} environments of "{self.id}" were asked for',
                "num_envs must be at least 1",
                "set num_envs",
            )

    def threads_for(self, num_envs: int) -> int:
        """Threads for an engine with `num_envs` environments: num_threads, or one per usable
        core."""
        return self.num_threads or min(num_envs, usable_cores())

    @property
    def is_atari(self) -> bool:
        """True for "ALE/*", the ids that the Atari-only fields apply to, whatever the engine."""
        return self.id.startswith("ALE/")

    @property
    def is_multi_agent(self) -> bool:
        """True for "pettingzoo/*": each agent is a row."""
        return self.id.startswith(MULTI_AGENT)

    @property
    def is_sim(self) -> bool:
        """True for "torch/*", "warp/*" and their like: simulators that step many environments as
        tensors on one device."""
        return self.id.startswith(SIM_FAMILIES)
