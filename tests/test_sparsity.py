"""The rules of bench.sparsity keep their bound for every token, and the bench writes what it says."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.sparsity import measure, rules
from bench.sparsity.__main__ import main
from cce_kernels.block_sparse import DC_BLOCK, DE_BLOCK, PART

TOKENS, COLUMNS = 256, 1024


def power_law(generator):
    return generator.permuted(np.arange(1, COLUMNS + 1.0) ** -2 * np.ones((TOKENS, 1)), axis=1)


def in_one_part(generator):
    return np.where(np.arange(COLUMNS) < PART, 1.0, 1e-6) * np.ones((TOKENS, 1))


def almost_sure(generator):
    """All of the mass but 2⁻²⁰ is the target's."""
    p = np.full((TOKENS, COLUMNS), 2.0**-30)
    p[np.arange(TOKENS), np.arange(TOKENS)] = 1
    return p


def just_at_the_bound(generator):
    """Each part but the first has exactly a 64th of its row's mass: of τ = 2⁻⁵ two fit, of τ = 2⁻⁷ none."""
    p = np.full((TOKENS, COLUMNS), 1.0)
    p[:, :PART] = 64 - COLUMNS // PART + 1
    return p


@pytest.mark.parametrize("tau", [2.0**-5, 2.0**-7])
@pytest.mark.parametrize("distribution", [power_law, in_one_part, almost_sure, just_at_the_bound])
def test_every_rule_keeps_the_bound_of_every_token(distribution, tau):
    p = distribution(np.random.default_rng(0)).astype(np.float32)
    rows, targets = np.arange(TOKENS), np.arange(TOKENS)
    p /= p.sum(1, keepdims=True)
    own = p[rows, targets]
    p[rows, targets] = 0
    masses = p.reshape(TOKENS, -1, PART).sum(-1).T
    found = jax.device_get(rules.decide(*map(jnp.asarray, (masses, targets, own)), tau))
    for name, keep in found.blocks.items():
        columns = COLUMNS // keep.shape[1]
        kept = np.repeat(keep, TOKENS // len(keep), axis=0)
        wide = p.astype(np.float64).reshape(TOKENS, -1, columns).sum(-1)
        assert (np.where(kept, 0, wide).sum(1) <= tau * wide.sum(1) * measure.SLACK).all(), name
        assert kept[rows, targets // columns].all(), name
        assert found.used[name] <= measure.SLACK, name
    for block in (DE_BLOCK, DC_BLOCK):
        pairs, union = (found.blocks[rules.named(rule, block)].mean() for rule in ("pairs", "union"))
        assert pairs <= union


def test_errors_are_those_of_the_products():
    """de and dc of what is kept, against the whole ones in float64."""
    generator = np.random.default_rng(3)
    e, c = (jnp.asarray(generator.normal(size=(n, 16)), jnp.bfloat16) for n in (256, 1024))
    c, targets = c.at[256:].multiply(0.5), jnp.asarray(generator.integers(0, 64, 256))  # the first columns are likely
    row = measure.of_case((e, c, targets), 0.5)
    p, masses, own = measure.probabilities(e, c, targets)
    found = rules.decide(masses, targets, own, 0.5)
    blocks = [np.asarray(found.blocks[rules.named("kernels", x)]) for x in (DE_BLOCK, DC_BLOCK)]
    p, e, c = (np.asarray(x, np.float64) for x in (p, e, c))
    of_de, of_dc = (np.where(np.kron(x, np.ones((256 // len(x), 1024 // x.shape[1]))), 0, p) for x in blocks)
    dz = p.copy()
    dz[np.arange(256), targets] = -p.sum(1)
    de, lost_de = (np.linalg.norm(x @ c) for x in (dz, of_de))
    dc, lost_dc = (np.linalg.norm(x.T @ e) for x in (dz, of_dc))
    assert max(x.mean() for x in blocks) < 1
    assert row["de"] == pytest.approx(lost_de / de, rel=0.02)
    assert row["dc"] == pytest.approx(lost_dc / dc, rel=0.02)


def test_the_command(tmp_path, monkeypatch, capsys):
    """As it is given, at a small head, in this process: its programs are then compiled once for all tests."""
    arguments = ["--data", "256x64x4096", "--ids", "own", "sorted", "--tau", "0.125"]
    monkeypatch.setattr(sys, "argv", ["bench.sparsity", *arguments, "--out", str(tmp_path / "sparsity")])
    main()
    found = json.loads((tmp_path / "sparsity.json").read_text())
    assert {row["ids"] for row in found["rows"]} == {"own", "sorted"}
    for row in found["rows"]:
        kept = row["kept"]
        assert 0 < kept["pairs 1x256"] <= kept["union 16x256"] <= 1
        assert kept["kernels 16x256"] <= kept["columns 16x256"] <= 1
        assert 0 <= row["de"] < 0.125
    assert 0 < found["filter"][0]["kept"] <= 1
    assert (tmp_path / "sparsity.png").read_bytes().startswith(b"\x89PNG")
    assert "kernels 16x256" in capsys.readouterr().out
