"""The table at the end of a run says what became of the tokens."""

from headrace.launch.report.token_text import tokens_text

TOKENS = {"generated": 900, "restored": 100, "trained": 750, "filtered": 250, "lost": 0, "holds": True}


def test_both_sides_of_the_account_are_shown_without_the_terms_that_are_0():
    shown = tokens_text({"tokens": TOKENS, "tokens_recomputed": {"full_cache": 1200, "weights": 30}})
    assert shown == (
        "900 generated + 100 restored = 750 trained (75%) + 250 filtered (25%); prefilled again: 1,200 full cache, 30 weights"
    )
    assert tokens_text({"tokens": TOKENS | {"served": 4000}}).endswith("250 filtered (25%); 4,000 served")
    assert tokens_text({"tokens": TOKENS | {"holds": False}}).endswith("250 filtered (25%): DOES NOT HOLD")
    assert tokens_text({}) == tokens_text({"tokens": {"generated": 0, "trained": 0, "holds": True}}) == ""
