//! Tests of the lines.

use super::*;
use crate::results::sample;

fn pingpong(series: &[(&str, f64)]) -> Outcome {
    let mut outcome = sample::empty("pingpong");
    for (series, ns) in series {
        let row = |figure: &str, unit: &str, value: f64| {
            Row::of_rounds(figure, series, 4 * MIB, unit, &[value])
        };
        outcome.rows.push(row("half round trip", "ns", *ns));
        outcome.rows.push(row("bandwidth", "GB/s", (4 * MIB) as f64 / ns));
    }
    outcome
}

fn texts(outcomes: &[Outcome]) -> Vec<String> {
    lines(outcomes).into_iter().map(|line| line.text).collect()
}

#[test]
fn a_copy_is_compared_by_the_key_of_its_rounds() {
    let texts = texts(&[sample::latency()]);
    assert_eq!(texts[1], "4 MiB copy: 25.0 GB/s, 2.31× memcpy");
    // The sample lacks this key, so the line shows the ratio of the medians.
    assert_eq!(texts[0], "64 KiB copy: 33.6 GB/s, 1.55× memcpy");
}

#[test]
fn the_share_that_is_hidden_is_a_percentage() {
    let mut outcome = sample::empty("overlap");
    outcome.rows.push(Row::of_rounds("hot", MEMFERRY, 4 * MIB, "overlap", &[0.987]));
    let lines = lines(&[outcome]);
    assert_eq!(lines[0].text, "4 MiB copy while computing: 99 % hidden");
    assert_eq!((lines[0].bar(), lines[0].ratio), (Some(0.987), None));
}

#[test]
fn a_message_is_compared_with_the_best_peer_and_no_reference() {
    let mut outcome = pingpong(&[
        (MEMFERRY, 245e3),
        ("Open MPI", 484e3),
        ("UCX", 426e3),
        ("Open MPI over memferry", 243e3),
    ]);
    outcome.summary.set("4m_vs_best", 1.75);
    assert_eq!(texts(&[outcome]), ["4 MiB message: 17.1 GB/s, 1.75× UCX"]);
}

#[test]
fn a_line_without_a_peer_says_so_and_has_no_bar() {
    let lines = lines(&[pingpong(&[(MEMFERRY, 245e3)])]);
    assert_eq!(lines[0].text, "4 MiB message: 17.1 GB/s, no peer found");
    assert_eq!((lines[0].bar(), lines[0].peer.as_deref()), (None, None));
}

#[test]
fn what_was_not_measured_has_no_line() {
    assert!(lines(&[sample::empty("gpu"), sample::empty("lookup")]).is_empty());
}
