"""What queueing theory says about simple queues: the judges of the simulation, and a first answer
without it.

Rates are per second, times in seconds. All need a utilisation below 1. (Kleinrock, Queueing Systems
1 and 2.)
"""

from __future__ import annotations

from math import factorial

from twin.errors import ConfigError


def utilisation(per_s: float, service_s: float, servers: int = 1) -> float:
    return per_s * service_s / servers


def mean_wait_mg1(per_s: float, service_s: float, variation: float) -> float:
    """Pollaczek-Khinchine: mean wait in M/G/1; `variation`: variance of the service time over its
    squared mean (1: exponential).
    """
    load = _stable(per_s, service_s, 1)
    return load * service_s * (1 + variation) / (2 * (1 - load))


def waits_mmc(per_s: float, service_s: float, servers: int) -> float:
    """Erlang C: the probability that a request of M/M/c has to wait."""
    load = _stable(per_s, service_s, servers)
    offered = load * servers
    last = offered**servers / factorial(servers) / (1 - load)
    return last / (sum(offered**k / factorial(k) for k in range(servers)) + last)


def mean_wait_mmc(per_s: float, service_s: float, servers: int) -> float:
    load = _stable(per_s, service_s, servers)
    return waits_mmc(per_s, service_s, servers) * service_s / (servers * (1 - load))


def mean_time_shared(per_s: float, service_s: float) -> float:
    """Mean time in the system when one server divides itself evenly, whatever the distribution of
    the work (M/G/1-PS).
    """
    return service_s / (1 - _stable(per_s, service_s, 1))


def _stable(per_s: float, service_s: float, servers: int) -> float:
    load = utilisation(per_s, service_s, servers)
    if not 0 <= load < 1:
        raise ConfigError(
            f"utilisation {load:.2f}: a queue has a steady state only below 1; add servers or "
            "take fewer requests"
        )
    return load
