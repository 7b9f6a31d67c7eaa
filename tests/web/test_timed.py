"""Times in texts are shown in the zone of the reader, as all others on a page."""

from taskd.web.pages.render import timed


def test_a_time_in_a_sentence_becomes_one_of_the_readers() -> None:
    said = timed("It was done 3s ago (2026-11-22 18:50:39+02:00), by <b>.")
    assert said == (
        'It was done 3s ago (<time datetime="2026-11-22T16:50:39.000Z">2026-11-22 16:50:39 UTC'
        "</time>), by &lt;b&gt;."
    )


def test_a_time_of_a_log_keeps_its_milliseconds() -> None:
    assert timed("2026-11-22T16:50:39.125+00:00 info   hello") == (
        '<time datetime="2026-11-22T16:50:39.125Z" data-ms>2026-11-22 16:50:39.125 UTC</time>'
        " info   hello"
    )


def test_what_is_no_time_stays_as_it_is() -> None:
    assert timed("2026-99-22 16:50:39+00:00 & more") == "2026-99-22 16:50:39+00:00 &amp; more"
