"""The baselines of the benchmark are the methods: what we are compared with meets the golden vectors too."""

from pathlib import Path


def test_plain_transcriptions_meet_the_golden_vectors(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    from benchmarks.methods import verify

    deviations = verify()
    assert set(deviations) == {"stata", "transclip", "mta", "zlap", "tpt"}
    assert max(deviations.values()) < 1e-4
