"""The constants of a launch of the narrow kernel: which forms its weights have, which endings its products.

They travel as text, a line a form: kernels take no tuples of words.
"""

from triton.runtime.jit import constexpr_function

WORDS = ("LOW", "HIGH", "SCALE", "OFFSET")


@constexpr_function
def forms(FORMS):
    lines = [dict(zip(WORDS, line.split())) for line in FORMS.splitlines()]
    return [{k: v if k == "SCALE" else int(v) for k, v in line.items()} for line in lines]


@constexpr_function
def form(FORMS, i, name):
    return forms(FORMS)[i][name]


@constexpr_function
def n_forms(FORMS):
    return len(forms(FORMS))


@constexpr_function
def with_high(FORMS, n):
    """The first form with n high bits a quant, or -1."""
    return next((i for i, f in enumerate(forms(FORMS)) if f["HIGH"] == n), -1)


@constexpr_function
def with_extra(FORMS):
    """The first form with a fourth array, or -1."""
    return next((i for i, f in enumerate(forms(FORMS)) if f["SCALE"] in ("int8", "nibbles", "half_min")), -1)


@constexpr_function
def extra_words(FORMS):
    """Numbers a row and super-block has in the fourth array, of the forms that have it; 0: none has."""
    scales = {f["SCALE"] for f in forms(FORMS)} & {"int8", "nibbles", "half_min"}
    found = {4 if scale == "half_min" else 1 for scale in scales}
    assert len(found) < 2, "products of one launch need one kind of fourth array"
    return found.pop() if found else 0


@constexpr_function
def has_extra(FORMS, i):
    return forms(FORMS)[i]["SCALE"] in ("int8", "nibbles", "half_min")


@constexpr_function
def holds(ENDS, end):
    """Whether one of a launch's endings is this."""
    return str(end) in ENDS.split()


@constexpr_function
def is_only(ENDS):
    return len(ENDS.split()) == 1
