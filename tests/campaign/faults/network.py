"""Partitions, delays, resets, half-open connections and flipped bits between coordinator and a service."""

from tests.campaign.faults.base import SERVED, Fault, Scene

_CUT_S, _SLOW_S, _DELAY_S = 6.0, 3.0, 0.05


async def _partition(scene: Scene, victim: str) -> None:
    proxy = scene.cluster.proxies[victim]
    proxy.is_cut = True

    def heal() -> None:
        proxy.is_cut = False
        proxy.reset()

    scene.undos.append((_CUT_S, heal))


async def _delay(scene: Scene, victim: str) -> None:
    proxy = scene.cluster.proxies[victim]
    proxy.delay_s = _DELAY_S

    def end() -> None:
        proxy.delay_s = 0.0

    scene.undos.append((_SLOW_S, end))


async def _reset(scene: Scene, victim: str) -> None:
    scene.cluster.proxies[victim].reset()


async def _half_open(scene: Scene, victim: str) -> None:
    scene.cluster.proxies[victim].silence()


async def _flip(scene: Scene, victim: str) -> None:
    proxy = scene.cluster.proxies[victim]
    proxy.flip_a_bit(scene.number)
    scene.undos.append((_CUT_S, proxy.flip_none))


FAULTS = (
    Fault("partition", SERVED, _partition),
    Fault("delay", SERVED, _delay),
    Fault("reset", SERVED, _reset),
    Fault("half-open", SERVED, _half_open),
    Fault("flip-on-the-way", SERVED, _flip),
)
