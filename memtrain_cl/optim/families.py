"""Families of distributions for sorted profiles: small frozen objects over scipy.stats.

A family has `fit(values)`, which gives the fitted one, `cdf` and `quantile`, all of float64 NumPy arrays, and
`standardised()`: the form that holds values of mean 0 whatever their sign. Any object with the first three will do in
their place. Values that a family cannot hold give parameters that are NaN, and so a distance of 1: a poor fit, not an
error. An object of somebody else's says so with a ValueError.
"""

from __future__ import annotations

import abc
import functools
import math
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]

#: Values that an iterative fit looks at, evenly spaced among the sorted ones.
SAMPLE = 4096


@runtime_checkable
class TailFamily(Protocol):
    """What a profile asks of a family; `fit` returns the fitted one."""

    def fit(self, values: Values) -> Any:
        """The member of the family that suits values [n]."""

    def cdf(self, values: Values) -> Values:
        """The share of the distribution at or below each value."""

    def quantile(self, shares: Values) -> Values:
        """The value below which each share, in (0, 1), of the distribution lies."""


@functools.cache
def _stats() -> ModuleType:
    # On first use: scipy.stats takes longer to import than all else.
    import scipy.stats

    module: ModuleType = scipy.stats
    return module


def _moments(values: Values) -> tuple[float, float, float]:
    """Mean, standard deviation and skewness; NaN where there is no spread."""
    with np.errstate(all="ignore"):
        mean = float(values.mean())
        apart = values - mean
        deviation = math.sqrt(float((apart * apart).mean()))
        skewness = float(np.mean((apart / deviation) ** 3)) if deviation > 0 else math.nan
    return mean, deviation, skewness


def order_statistics(ordered: Values, count: int = SAMPLE) -> Values:
    """At most `count` of sorted values, evenly spaced."""
    if len(ordered) <= count:
        return ordered
    return ordered[((np.arange(count) + 0.5) * (len(ordered) / count)).astype(np.int64)]


class _Family(abc.ABC):
    """cdf and quantile by way of scipy's distribution."""

    @abc.abstractmethod
    def _distribution(self) -> Any:
        """scipy's frozen distribution."""

    def cdf(self, values: Values) -> Values:
        """The share of the distribution at or below each value."""
        with np.errstate(all="ignore"):
            return np.asarray(self._distribution().cdf(values), dtype=np.float64)

    def quantile(self, shares: Values) -> Values:
        """The value below which each share of the distribution lies."""
        with np.errstate(all="ignore"):
            return np.asarray(self._distribution().ppf(shares), dtype=np.float64)

    def standardised(self) -> Self:
        """The form that holds values of mean 0."""
        return self


@dataclass(frozen=True)
class Gaussian(_Family):
    """The normal distribution of mean mu and variance sigma2; fitted by maximum likelihood."""

    mu: float = 0.0
    sigma2: float = 1.0

    def _distribution(self) -> Any:
        return _stats().norm(self.mu, math.sqrt(self.sigma2))

    def fit(self, values: Values) -> Gaussian:
        """Mean and variance of the values."""
        mean, deviation, _ = _moments(values)
        return Gaussian(mean, deviation * deviation)


@dataclass(frozen=True)
class Laplace(_Family):
    """The double exponential distribution around mu, of mean distance b; fitted by maximum likelihood."""

    mu: float = 0.0
    b: float = math.sqrt(0.5)

    def _distribution(self) -> Any:
        return _stats().laplace(self.mu, self.b)

    def fit(self, values: Values) -> Laplace:
        """Median, and mean distance from it."""
        with np.errstate(all="ignore"):
            median = float(np.median(values))
            return Laplace(median, float(np.abs(values - median).mean()))


@dataclass(frozen=True)
class StudentT(_Family):
    """Student's t with df degrees of freedom, moved by mu and stretched by scale.

    Fitted by maximum likelihood to at most 4096 of the sorted values, evenly spaced.
    """

    df: float = 5.0
    mu: float = 0.0
    scale: float = 1.0

    def _distribution(self) -> Any:
        return _stats().t(self.df, self.mu, self.scale)

    def fit(self, values: Values) -> StudentT:
        """The likeliest parameters; NaN where values have no spread or are not finite."""
        nothing = StudentT(math.nan, math.nan, math.nan)
        mean, deviation, _ = _moments(values)
        if not (math.isfinite(mean) and 0 < deviation < math.inf):
            return nothing
        # In units of the deviation, in which the search finds its way whatever the values' size.
        sample = (order_statistics(np.sort(values)) - mean) / deviation
        with np.errstate(all="ignore"):
            try:
                df, mu, scale = _stats().t.fit(sample, 5.0, loc=0.0, scale=0.8)
            except _stats().FitError:
                return nothing
        return StudentT(float(df), mean + deviation * float(mu), deviation * float(scale))


@dataclass(frozen=True)
class Gamma(_Family):
    """The gamma distribution of shape and scale, from loc on.

    Fitted by maximum likelihood with loc 0, which holds positive values alone; `located`: by mean, variance and
    skewness, which counts as 0.001 below and as 2 above, where the density would end in a pole.
    """

    shape: float = 1.0
    loc: float = 0.0
    scale: float = 1.0
    located: bool = False

    def _distribution(self) -> Any:
        return _stats().gamma(self.shape, self.loc, self.scale)

    def standardised(self) -> Gamma:
        """The form with a location."""
        return replace(self, located=True)

    def fit(self, values: Values) -> Gamma:
        """The fitted one; of NaN for values that it cannot hold."""
        nothing = Gamma(math.nan, math.nan, math.nan, self.located)
        mean, deviation, skewness = _moments(values)
        if not (math.isfinite(mean) and 0 < deviation < math.inf):
            return nothing
        if self.located:
            skewness = min(max(skewness, 1e-3), 2.0)
            return Gamma(4 / skewness**2, mean - 2 * deviation / skewness, deviation * skewness / 2, True)
        if float(values.min()) <= 0:
            return nothing
        with np.errstate(all="ignore"):
            try:
                shape, _, scale = _stats().gamma.fit(values / mean, floc=0)
            except _stats().FitError:
                return nothing
        return Gamma(float(shape), 0.0, float(scale) * mean)


@dataclass(frozen=True)
class LogNormal(_Family):
    """loc + exp of a normal distribution of mean mu and standard deviation sigma.

    Fitted by maximum likelihood with loc 0, which holds positive values alone; `located`: by mean, variance and
    skewness, of which a skewness below 0.001 counts as that.
    """

    mu: float = 0.0
    sigma: float = 1.0
    loc: float = 0.0
    located: bool = False

    def _distribution(self) -> Any:
        return _stats().lognorm(self.sigma, self.loc, math.exp(self.mu))

    def standardised(self) -> LogNormal:
        """The form with a location."""
        return replace(self, located=True)

    def fit(self, values: Values) -> LogNormal:
        """The fitted one; of NaN for values that it cannot hold."""
        nothing = LogNormal(math.nan, math.nan, math.nan, self.located)
        mean, deviation, skewness = _moments(values)
        if not (math.isfinite(mean) and 0 < deviation < math.inf):
            return nothing
        if self.located:
            # With t = sqrt(exp(sigma^2) - 1) the skewness is t^3 + 3t, the deviation t*exp(mu + sigma^2/2).
            t = 2 * math.sinh(math.asinh(max(skewness, 1e-3) / 2) / 3)
            sigma2 = math.log1p(t * t)
            return LogNormal(math.log(deviation / t) - sigma2 / 2, math.sqrt(sigma2), mean - deviation / t, True)
        if float(values.min()) <= 0:
            return nothing
        logarithms = np.log(values)
        return LogNormal(float(logarithms.mean()), float(logarithms.std()))


#: By the names that options take.
FAMILIES: dict[str, TailFamily] = {
    "gaussian": Gaussian(),
    "gamma": Gamma(),
    "lognormal": LogNormal(),
    "student_t": StudentT(),
    "laplace": Laplace(),
}


def family_of(given: Any) -> TailFamily:
    """A family by itself or by its name, Gaussian for None. ValueError or TypeError for anything else."""
    if given is None:
        return FAMILIES["gaussian"]
    if isinstance(given, str):
        if given not in FAMILIES:
            raise ValueError(f"expected a family of {', '.join(FAMILIES)}, got {given!r}")
        return FAMILIES[given]
    if isinstance(given, type) or not isinstance(given, TailFamily):
        raise TypeError(f"expected a family as an object with fit, cdf and quantile, got {given!r}")
    return given
