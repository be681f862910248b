"""Rows that stress a quantizer, by name; each float32 [rows, columns]."""

import numpy as np


def stress_rows(n_rows: int = 24, n_columns: int = 768, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (n_rows, n_columns)
    normal = rng.standard_normal(shape).astype(np.float32)
    outlier = normal * np.float32(1e-3)
    outlier[np.arange(n_rows), rng.integers(0, n_columns, n_rows)] = 40
    holes = normal.copy()
    holes[:, : n_columns // 2] = 0
    sparse = np.where(rng.random(shape) < 0.9, np.float32(0), normal)
    steps = (rng.integers(-127, 128, shape) * np.float32(0.0078125)).astype(np.float32)
    ties = np.where(rng.random(shape) < 0.5, np.float32(0.5), np.float32(-0.5))
    return {
        "normal": normal,
        "heavy": rng.standard_t(2, shape).astype(np.float32),
        "zero": np.zeros(shape, np.float32),
        "minus_zero": np.full(shape, -0.0, np.float32),
        "constant": np.full(shape, 0.37, np.float32),
        "minus_constant": np.full(shape, -1.5, np.float32),
        "one_outlier": outlier,
        "tiny": (normal * np.float32(1e-30)).astype(np.float32),
        "small": (normal * np.float32(1e-6)).astype(np.float32),
        "huge": (rng.uniform(-60000, 60000, shape)).astype(np.float32),
        "negative": -np.abs(normal),
        "positive": np.abs(normal) + np.float32(0.1),
        "half_empty": holes,
        "sparse": sparse,
        "steps": steps,
        "ties": ties,
        "ramp": np.broadcast_to(np.linspace(-1, 1, n_columns, dtype=np.float32), shape).copy(),
    }
