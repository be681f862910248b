"""The sampler chain once more, independently: Python floats, lists and textbook formulas, nothing shared.

Where the product sums integer weights, this sums floats; where it filters arrays, this walks lists.
"""

import math

M = (1 << 64) - 1


def finalizer(z):
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M
    return z ^ (z >> 31)


def uniform(seed, position, stream):
    """SplitMix64, started at a hash of seed and stream, stepped position + 1 times."""
    state = finalizer((seed + 0x9E3779B97F4A7C15 * (stream + 1)) & M)
    state = (state + 0x9E3779B97F4A7C15 * (position + 1)) & M
    return (finalizer(state) >> 11) / 9007199254740992.0


def softmax(cands):
    top = max(logit for _, logit in cands)
    e = [math.exp(logit - top) if logit > -math.inf else 0.0 for _, logit in cands]
    total = math.fsum(e)
    return [x / total for x in e]


def descending(cands):
    return sorted(cands, key=lambda c: (-c[1], c[0]))


def penalties(cands, p, history):
    recent = list(history)[-p.repeat_last_n :] if p.repeat_last_n else []
    out = []
    for token, logit in cands:
        n = recent.count(token)
        if n:
            logit = logit * p.repeat_penalty if logit <= 0 else logit / p.repeat_penalty
            logit -= n * p.frequency_penalty + p.presence_penalty
        out.append((token, logit))
    return out


def dry_lengths(history, limit):
    """token -> longest repetition it would continue, by comparing suffixes character by character."""
    best = {}
    n = len(history)
    for end in range(1, n):  # the earlier match ends before `end`; history[end] followed it
        length = 0
        while length < end and history[end - 1 - length] == history[n - 1 - length]:
            length += 1
        best[history[end]] = max(best.get(history[end], 0), min(length, limit))
    return best


def dry(cands, p, history):
    recent = list(history)[-p.dry_penalty_last_n :]
    if len(recent) <= p.dry_allowed_length:
        return cands
    limit = len(recent)
    for back in range(len(recent)):  # the latest breaker ends the search
        tails = p.breakers.tails.get(recent[-1 - back], ())
        lengths = [len(t) for t in tails if len(t) <= back and list(t) == recent[len(recent) - back :][: len(t)]]
        if lengths:
            limit = back - max(lengths)
            break
    if limit < p.dry_allowed_length:
        return cands
    longest = dry_lengths(recent, limit)
    out = []
    for token, logit in cands:
        n = longest.get(token, 0)
        if token in longest and n >= p.dry_allowed_length and () not in p.breakers.tails.get(token, ()):
            logit -= p.dry_multiplier * p.dry_base ** (n - p.dry_allowed_length)
        out.append((token, logit))
    return out


def top_n_sigma(cands, p):
    finite = [logit for _, logit in cands if logit > -math.inf]
    if p.top_n_sigma <= 0 or len(cands) <= 1:
        return cands
    mean = math.fsum(finite) / len(finite)
    std = math.sqrt(math.fsum((x - mean) ** 2 for x in finite) / len(finite))
    return [(t, x if x >= max(finite) - p.top_n_sigma * std else -math.inf) for t, x in cands]


def typical(cands, p):
    if p.typical_p >= 1:
        return cands
    cands = descending(cands)
    probs = softmax(cands)
    entropy = -math.fsum(q * math.log(q) for q in probs if q > 0)
    ranked = sorted(zip(cands, probs), key=lambda cq: abs((-math.log(cq[1]) if cq[1] > 0 else math.inf) - entropy))
    out, running = [], 0.0
    for cand, q in ranked:
        out.append(cand)
        running += q
        if running > p.typical_p and len(out) >= p.min_keep:
            break
    return out


def top_p(cands, p):
    if p.top_p >= 1:
        return cands
    cands = descending(cands)
    out, running = [], 0.0
    for cand, q in zip(cands, softmax(cands)):
        out.append(cand)
        running += q
        if running >= p.top_p and len(out) >= max(1, p.min_keep):
            break
    return out


def min_p(cands, p):
    if p.min_p <= 0:
        return cands
    cands = descending(cands)
    return [c for i, c in enumerate(cands) if i < p.min_keep or c[1] >= cands[0][1] + math.log(p.min_p)]


def xtc(cands, p, u):
    if p.xtc_probability <= 0 or p.xtc_threshold > 0.5 or len(cands) < 2 or u > p.xtc_probability:
        return cands
    cands = descending(cands)
    last = -1
    for i, q in enumerate(softmax(cands)):
        if q < p.xtc_threshold:
            break
        last = i
    return cands[last:] if last > 0 and len(cands) - last >= p.min_keep else cands


def temperature(cands, p):
    t = p.temperature
    if p.dynatemp_range > 0:
        if len(cands) <= 1:
            return cands
        probs = softmax(cands)
        entropy = -math.fsum(q * math.log(q) for q in probs if q > 0)
        low, high = max(0.0, t - p.dynatemp_range), t + p.dynatemp_range
        t = low + (high - low) * (entropy / math.log(len(cands))) ** p.dynatemp_exponent
    if t <= 0:
        return descending(cands)[:1]
    return [(token, logit / t) for token, logit in cands]


def chain(logits, p, history, u_xtc):
    """Candidates (token, logit) that are left for the choice, in falling order."""
    bias = dict(p.logit_bias)
    cands = [(t, float(x) + bias.get(t, 0.0)) for t, x in enumerate(logits)]
    steps = {
        "penalties": lambda c: penalties(c, p, history) if p.penalizes else c,
        "dry": lambda c: dry(c, p, history) if p.dry_multiplier else c,
        "top_n_sigma": lambda c: top_n_sigma(c, p),
        "top_k": lambda c: descending(c)[: p.top_k] if p.top_k > 0 else c,
        "typ_p": lambda c: typical(c, p),
        "top_p": lambda c: top_p(c, p),
        "min_p": lambda c: min_p(c, p),
        "xtc": lambda c: xtc(c, p, u_xtc),
        "temperature": lambda c: temperature(c, p),
    }
    for name in p.samplers:
        cands = steps[name](cands)
    return descending(cands)


def choose(cands, u):
    running = 0.0
    probs = softmax(cands)
    for (token, _), q in zip(cands, probs):
        running += q
        if running > u:
            return token
    return cands[-1][0]


def sample(logits, p, seed, position, history=(), streams=(0, 1)):
    cands = chain(logits, p, history, uniform(seed, position, streams[1]))
    return choose(cands, uniform(seed, position, streams[0]))


def mirostat(logits, p, mu, u):
    """(token, mu after it)."""
    cands = [(t, float(x)) for t, x in enumerate(logits)]
    cands = temperature(cands, p)
    cands = descending(cands)
    probs = softmax(cands)
    if p.mirostat == 1:
        num = den = 0.0
        for i in range(min(99, len(cands) - 1)):
            t = math.log((i + 2) / (i + 1))
            num += t * math.log(probs[i] / probs[i + 1])
            den += t * t
        s = num / den
        e = s - 1
        k = (e * 2**mu / (1 - len(logits) ** (-e))) ** (1 / s)
        cands = cands[: max(1, int(k))]
    else:
        n = next((i for i, q in enumerate(probs) if -math.log2(q) > mu), len(cands))
        cands = cands[: max(1, n)]
    token = choose(cands, u)
    q = dict(zip((t for t, _ in cands), softmax(cands)))[token]
    return token, mu - p.mirostat_eta * (-math.log2(q) - p.mirostat_tau)
