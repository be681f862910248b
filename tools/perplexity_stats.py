"""llama-perplexity's statistics, over values per scored token (float64 arrays)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

KLD_PERCENTILES = (99.9, 99.0, 95.0, 90.0, 50.0, 10.0, 5.0, 1.0, 0.1)
P_PERCENTILES = (99.9, 99.0, 95.0, 90.0, 75.0, 50.0, 25.0, 10.0, 5.0, 1.0, 0.1)


def mean_and_error(values: np.ndarray) -> tuple[float, float]:
    """Mean and its standard error."""
    n = len(values)
    mean = float(values.mean())
    variance = float((values * values).mean()) - mean * mean
    return mean, math.sqrt(max(variance, 0.0) / (n - 1)) if n > 1 else 0.0


def covariance_of_means(a: np.ndarray, b: np.ndarray) -> float:
    if len(a) < 10:
        return 0.0
    return float((a * b).mean() - a.mean() * b.mean()) / (len(a) - 1)


def percentile(ordered: np.ndarray, percent: float) -> float:
    """Linear between neighbours; `ordered` rises."""
    at = percent / 100 * (len(ordered) - 1)
    low = int(at)
    return float((1 - (at - low)) * ordered[low] + (at - low) * ordered[min(low + 1, len(ordered) - 1)])


def perplexity_of(nll: np.ndarray) -> tuple[float, float]:
    """exp(mean nll) and its error."""
    mean, error = mean_and_error(nll)
    return math.exp(mean), math.exp(mean) * error


@dataclass(frozen=True)
class Comparison:
    """Two models over the same tokens: values per token; `same_top` [n] bool."""

    nll: np.ndarray
    nll_base: np.ndarray
    kld: np.ndarray
    p_diff: np.ndarray
    same_top: np.ndarray

    def log_ratio(self) -> tuple[float, float]:
        """ln(PPL(Q) / PPL(base)) and its error; the two means vary together."""
        (a, ea), (b, eb) = mean_and_error(self.nll), mean_and_error(self.nll_base)
        covariance = covariance_of_means(self.nll, self.nll_base)
        return a - b, math.sqrt(max(ea * ea + eb * eb - 2 * covariance, 0.0))

    def correlation(self) -> float:
        """Of the two means; 0 where one of them does not vary."""
        error = mean_and_error(self.nll)[1] * mean_and_error(self.nll_base)[1]
        return covariance_of_means(self.nll, self.nll_base) / error if error > 0 else 0.0

    def difference(self) -> tuple[float, float]:
        """PPL(Q) - PPL(base) and its error."""
        (a, ea), (b, eb) = perplexity_of(self.nll), perplexity_of(self.nll_base)
        covariance = a * b * covariance_of_means(self.nll, self.nll_base)
        return a - b, math.sqrt(max(ea * ea + eb * eb - 2 * covariance, 0.0))

    def p_rms(self) -> tuple[float, float]:
        mean, error = mean_and_error(self.p_diff**2)
        rms = math.sqrt(mean)
        return rms, 0.5 / rms * error if rms > 0 else 0.0

    def top(self) -> tuple[float, float]:
        share, n = float(self.same_top.mean()), len(self.same_top)
        return share, math.sqrt(share * (1 - share) / (n - 1)) if n > 1 else 0.0

    def chunk_line(self, chunk: int) -> str:
        """The running line after a chunk."""
        ppl, ratio, kld = perplexity_of(self.nll), self.log_ratio(), mean_and_error(self.kld)
        rms, top = self.p_rms(), self.top()
        return (
            f"{chunk:4d}    {ppl[0]:9.4f} ± {ppl[1]:9.4f}    {ratio[0]:10.5f} ± {ratio[1]:10.5f}"
            f"    {kld[0]:10.5f} ± {kld[1]:10.5f}    {100 * rms[0]:6.3f} ± {100 * rms[1]:6.3f} %"
            f"    {100 * top[0]:6.3f} ± {100 * top[1]:6.3f} %"
        )

    def report(self) -> str:
        """The closing tables."""
        ratio = self.log_ratio()
        lines = ["====== Perplexity statistics ======"]
        for name, (value, error) in (
            ("Mean PPL(Q)                   ", perplexity_of(self.nll)),
            ("Mean PPL(base)                ", perplexity_of(self.nll_base)),
        ):
            lines.append(f"{name}: {value:10.6f} ± {error:10.6f}")
        lines.append(f"Cor(ln(PPL(Q)), ln(PPL(base))): {100 * self.correlation():6.2f}%")
        for name, (value, error) in (
            ("Mean ln(PPL(Q)/PPL(base))     ", ratio),
            ("Mean PPL(Q)/PPL(base)         ", (math.exp(ratio[0]), math.exp(ratio[0]) * ratio[1])),
            ("Mean PPL(Q)-PPL(base)         ", self.difference()),
        ):
            lines.append(f"{name}: {value:10.6f} ± {error:10.6f}")

        kld, ordered = mean_and_error(self.kld), np.sort(self.kld)
        lines += ["", "====== KL divergence statistics ======", f"Mean    KLD: {kld[0]:10.6f} ± {kld[1]:10.6f}",
                  f"Maximum KLD: {ordered[-1]:10.6f}"]  # fmt: skip
        lines += [f"{_rank(p)} KLD: {percentile(ordered, p):10.6f}" for p in KLD_PERCENTILES]
        lines.append(f"Minimum KLD: {ordered[0]:10.6f}")

        mean, ordered = mean_and_error(self.p_diff), np.sort(self.p_diff)
        lines += ["", "====== Token probability statistics ======",
                  f"Mean    Δp: {100 * mean[0]:6.3f} ± {100 * mean[1]:5.3f} %",
                  f"Maximum Δp: {100 * ordered[-1]:6.3f}%"]  # fmt: skip
        lines += [f"{_rank(p)} Δp: {100 * percentile(ordered, p):6.3f}%" for p in P_PERCENTILES]
        rms, top = self.p_rms(), self.top()
        lines += [f"Minimum Δp: {100 * ordered[0]:6.3f}%", f"RMS Δp    : {100 * rms[0]:6.3f} ± {100 * rms[1]:5.3f} %",
                  f"Same top p: {100 * top[0]:6.3f} ± {100 * top[1]:5.3f} %"]  # fmt: skip
        return "\n".join(lines)


def _rank(percent: float) -> str:
    return "Median " if percent == 50 else f"{percent:4.1f}%  "


HEADER = (
    "chunk             PPL               ln(PPL(Q)/PPL(base))          KL Divergence              Δp RMS"
    "            Same top p"
)
