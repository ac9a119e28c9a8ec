"""Rows of reductions, of what works along one dim, and of torch's loss functions."""

from __future__ import annotations

from whale.operations.elementwise import pointwise
from whale.operations.operation import Label, Labels, Operation, dims_of, letters
from whale.operations.row import PARTIAL, SAME, Dims, add_rows, dims, in_first, needed_whole, row

OVER_SAMPLES = "`{name}` is taken over all samples"


@row("sum mean nansum count_nonzero")
def additive(op: Operation) -> Dims | None:
    """Summed over a dim that is cut: a partial sum. A mean divides by the whole size."""
    labels, result, reduced = _reduced(op)
    names = [f"d{dim}" for dim in sorted(reduced) if dim < len(labels)]  # a single number has none
    local = dict.fromkeys(names, "mean") if op.name == "mean" else None
    return dims([labels], [result], sums=names, local=local)


add_rows("sum mean", linear=in_first)
add_rows("mean amax max min argmax var norm linalg_vector_norm", timed_as="sum")


@row(
    "prod amax amin aminmax max min argmin any all var std var_mean std_mean norm median nanmedian "
    "mode kthvalue linalg_vector_norm linalg_norm linalg_matrix_norm logsumexp nanmean",
    mixes=OVER_SAMPLES,
)
def reduction(op: Operation) -> Dims | None:
    """Whole along what is reduced."""
    if op.name in ("max", "min") and len(op.inputs) == 2:
        return pointwise(op)
    labels, result, reduced = _reduced(op)
    return dims([letters("d", len(labels), reduced)], [result] * len(op.outputs))


def _reduced(op: Operation) -> tuple[list[Label], list[Label], set[int]]:
    """(labels of the input, labels of the result, dims that are reduced)."""
    rank = len(op.shapes[0])
    reduced = set(dims_of(op, rank))
    labels = letters("d", rank)
    keeps = len(op.outputs[0]) == rank and rank > 0
    result: list[Label] = []
    for dim, label in enumerate(labels):
        if dim not in reduced:
            result.append(label)
        elif keeps:
            result.append(None)
    return labels, result, reduced


@row("quantile nanquantile", mixes=OVER_SAMPLES)
def quantile(op: Operation) -> Dims | None:
    """Several quantiles stand in a new first dim."""
    rank = len(op.shapes[0])
    reduced = dims_of(op, rank)
    source = letters("d", rank, reduced)
    result = source
    if not op.argument("keepdim"):
        result = [label for label in source if label is not None]
    quantiles: list[Label] = [None] * len(op.shape("q") or ())
    return dims(op.named(self=source), [[*quantiles, *result]])


@row("cosine_similarity", mixes=OVER_SAMPLES)
def cosine_similarity(op: Operation) -> Dims | None:
    """Two tensors, matched from the right, and one dim that is reduced."""
    rank = max(len(shape) for shape in op.shapes)
    (dim,) = dims_of(op, rank)
    labels = letters("d", rank, [dim])
    result = [*labels[:dim], *labels[dim + 1 :]]
    return dims([labels[rank - len(shape) :] for shape in op.shapes], [result])


@row("softmax log_softmax", backward_passes=3)  # reads result and gradient, writes
def normalised(op: Operation) -> Dims | None:
    """Along the normalised dim maxima and sums of rows are exchanged."""
    rank = len(op.shapes[0])
    dim = dims_of(op, rank)[0]
    labels = letters("d", rank)
    return dims([labels], [labels], local={f"d{dim}": "softmax"})


add_rows("log_softmax _safe_softmax logsumexp", timed_as="softmax")


@row("_softmax _log_softmax softmin glu")
def along(op: Operation) -> Dims | None:
    """Whole along the dim that is normalised."""
    rank = len(op.shapes[0])
    labels = letters("d", rank, dims_of(op, rank)[:1])
    return dims([labels], [labels])


@row("renorm")
def renorm(op: Operation) -> Dims | None:
    """Each slice along the dim has a norm of its own: the other dims are needed whole."""
    rank = len(op.shapes[0])
    dim = dims_of(op, rank)[0]
    labels: list[Label] = [None] * rank
    labels[dim] = "d"
    return dims([labels], [labels])


@row("argmax", mixes=OVER_SAMPLES)
def argmax(op: Operation) -> Dims | None:
    """The largest of everyone's largest; the same on all devices then."""
    labels, result, reduced = _reduced(op)
    if op.argument("dim") is None:
        return needed_whole(op)
    letter = f"d{min(reduced)}"
    return dims([labels], [result], local={letter: "argmax"}, after={letter: SAME})


MATRIX_ROWS = "`{name}` takes the samples as rows of one matrix"


@row(
    "svd qr cholesky inverse det slogdet logdet pinverse matrix_exp linalg_svd linalg_svdvals "
    "linalg_qr linalg_cholesky linalg_inv linalg_pinv linalg_det linalg_slogdet linalg_eig "
    "linalg_eigh linalg_eigvals linalg_eigvalsh linalg_matrix_power linalg_matrix_exp "
    "linalg_matrix_rank linalg_cond linalg_lu linalg_lu_factor cholesky_inverse cov corrcoef "
    "tril triu",
    mixes=MATRIX_ROWS,
)
def matrix(op: Operation) -> Dims | None:
    """Operations on matrices, the last two dims; the dims before them are independent. Further
    tensors (weights of `cov`, tolerances of `linalg_pinv`) are needed whole.
    """
    lead = letters("d", len(op.shapes[0]) - 2)
    inputs = [*lead, None, None][: len(op.shapes[0])]
    outputs: list[Labels] = []
    for shape in op.outputs:
        outputs.append([*lead, *([None] * (len(shape) - len(lead)))])
    others: list[Labels] = [[None] * len(shape) for shape in op.shapes[1:]]
    return dims([inputs, *others], outputs)


add_rows("tril triu", linear=in_first)

PIVOTS = ("LU_pivots", "pivots")
"""arguments of the solvers that hold a vector for each matrix"""


@row(
    "linalg_solve linalg_solve_triangular triangular_solve linalg_lstsq cholesky_solve lu_solve "
    "linalg_lu_solve",
    mixes=MATRIX_ROWS,
)
def solve(op: Operation) -> Dims | None:
    """Systems of equations, in the last two dims of every tensor but for vectors; the dims before
    them are independent, and broadcast. What `linalg_lstsq` does not compute is empty.
    """
    num_own = [2] * len(op.shapes)
    for name in PIVOTS:
        slot = op.slot(name)
        if slot is not None:
            num_own[slot] = 1
    # torch's rule for right-hand sides that are vectors
    if op.name in ("linalg_solve", "linalg_lstsq"):
        if len(op.shapes[1]) == 1 or op.shapes[1] == op.shapes[0][:-1]:
            num_own[1] = 1
    num_lead = max(len(shape) - own for shape, own in zip(op.shapes, num_own, strict=True))
    lead = letters("d", num_lead)
    inputs: list[Labels] = []
    for shape, own in zip(op.shapes, num_own, strict=True):
        inputs.append([*lead[num_lead - len(shape) + own :], *([None] * own)])
    outputs: list[Labels] = []
    for shape in op.outputs:
        found = [] if shape == (0,) else lead
        outputs.append([*found, *([None] * (len(shape) - len(found)))])
    return dims(inputs, outputs, after=dict.fromkeys(map(str, lead), SAME))


# the same for entries in any order; how many counts there are depends on their values
add_rows("histc", kind="histogram")
add_rows("bincount", samples="sum")

# --------------------------------------------------------------------------------------------------
# losses

REDUCTIONS = ("none", "mean", "sum")
"""what the argument `reduction` of torch's losses means, by its number"""
NONE = REDUCTIONS.index("none")
MEAN = REDUCTIONS.index("mean")
SUM = REDUCTIONS.index("sum")
OTHER_PLACES = "`{name}` combines samples that stand in different places"


@row(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits kl_div poisson_nll_loss soft_margin_loss "
    "margin_ranking_loss hinge_embedding_loss",
    kind="loss",
    mixes=OTHER_PLACES,
)
def pointwise_loss(op: Operation) -> Dims | None:
    """A loss of each entry, then a sum or a mean over all of them."""
    how = REDUCTIONS[op.argument("reduction")]
    rank = max(len(shape) for shape in op.shapes)
    labels = letters("d", rank)
    inputs = [labels[rank - len(shape) :] for shape in op.shapes]
    if how == "none":
        return dims(inputs, [labels])
    local = {str(label): "mean loss" for label in labels} if how == "mean" else None
    return dims(inputs, [[]], sums=labels, local=local)


@row(
    "cross_entropy_loss nll_loss_nd nll_loss nll_loss2d",
    kind="class loss",
    mixes=OTHER_PLACES,
)
def class_loss(op: Operation) -> Dims | None:
    """Rows of logits and targets run along each other. The classes may be cut too: only maxima,
    sums and target logits are exchanged. A mean divides by the number of targets that count, which
    the letters do not know (`capture/losses.py` makes a sum of it).
    """
    how = REDUCTIONS[op.argument("reduction")]
    rank = len(op.shapes[0])
    if how == "mean" or rank < 2:
        return None
    rows = letters("r", rank - 1)
    classes: Label = "classes" if op.name == "cross_entropy_loss" else None
    logits: Labels = [rows[0], classes, *rows[1:]]
    has_probabilities = len(op.shapes[1]) == rank
    inputs = op.named(self=logits, target=logits if has_probabilities else rows, weight=[classes])
    return dims(
        inputs,
        [[] if how == "sum" else rows],
        sums=rows if how == "sum" else (),
        local={"classes": "class loss"},
        after={"classes": PARTIAL},
    )


def _ctc(op: Operation) -> Dims | None:
    """The losses of the samples and a table of each (`capture/ctc_loss.py`), from logarithms (time,
    sample, class), targets (sample, label) and lengths.
    """
    lengths = [("n",), ("n",)]
    return dims([(None, "n", None), ("n", None), *lengths], [("n",), ("n", None, None)])


add_rows("ctc_loss", dims=_ctc, timed_as="cross_entropy_loss")
add_rows("nll_loss nll_loss_nd mse_loss l1_loss", timed_as="cross_entropy_loss")
