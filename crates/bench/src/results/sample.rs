//! Invented outcomes for the tests of the views. The numbers are plausible, so that a report of
//! them resembles a real one, but none of them was measured.

use std::collections::BTreeMap;

use crate::results::outcome::{Machine, Outcome, Row, Summary};

/// An outcome without rows, on an invented machine.
pub fn empty(bench: &str) -> Outcome {
    Outcome {
        bench: bench.to_owned(),
        busy: Some(0.0),
        throttled: Some(0.0),
        machine: Machine {
            cpu: "Invented Processor 8000 @ 2.40GHz".to_owned(),
            cores: 2,
            l1_bytes: 48 << 10,
            l2_bytes: 2 << 20,
            l3_bytes: 260 << 20,
            memory_bytes: 8_322_000_000,
            kernel: "6.1.0".to_owned(),
            streaming: ["movdir64b", "avx512", "avx2", "sse2", "plain"].map(String::from).to_vec(),
        },
        versions: BTreeMap::from([("memferry".to_owned(), "0.1.0".to_owned())]),
        rows: Vec::new(),
        summary: Summary::default(),
        missing: Vec::new(),
        notes: Vec::new(),
    }
}

/// An outcome of the latency bench with two figures over size.
pub fn latency() -> Outcome {
    let mut outcome = empty("copy-latency");
    for exponent in 6..=28 {
        let bytes = 1_u64 << exponent;
        let memcpy = curve(bytes, 45.0, 22.0, 9.0);
        let ours = curve(bytes, 45.0, 34.0, 25.0);
        let points = [
            ("hot", "memcpy", memcpy),
            ("hot", "memferry, 1 channel", curve(bytes, 44.0, 23.0, 14.0)),
            ("hot", "memferry, 2 channels", ours),
            ("cold", "memcpy", memcpy * 0.6),
            ("cold", "memferry, 1 channel", memcpy * 0.75),
            ("cold", "memferry, 2 channels", ours * 0.8),
        ];
        for (figure, series, value) in points {
            outcome.rows.push(row(figure, series, bytes, value, "GB/s"));
        }
    }
    set(
        &mut outcome,
        &[
            ("hot_4k_vs_memcpy", 0.99),
            ("hot_1m_vs_memcpy", 1.58),
            ("hot_4m_vs_memcpy", 2.31),
            ("hot_64m_vs_memcpy", 2.83),
            ("hot_256m_vs_memcpy", 1.62),
            ("worst_small_vs_memcpy", 0.93),
        ],
    );
    outcome.notes.push("The second channel runs on the caller's own core.".to_owned());
    outcome
}

/// One outcome for each kind of plot in the report.
pub fn suite() -> Vec<Outcome> {
    vec![latency(), bandwidth(), overlap(), overhead(), pollution()]
}

fn bandwidth() -> Outcome {
    let mut outcome = empty("copy-bandwidth");
    for exponent in 12..=24 {
        let bytes = 1_u64 << exponent;
        let memcpy = curve(bytes, 11.0, 10.0, 9.0);
        for (series, value) in
            [("memcpy", memcpy), ("rayon", memcpy * 1.5), ("memferry", memcpy * 2.4)]
        {
            outcome.rows.push(row("cold", series, bytes, value, "GB/s"));
        }
    }
    set(&mut outcome, &[("cold_64k_vs_memcpy", 1.7), ("cold_4m_vs_memcpy", 2.4)]);
    outcome.missing.push("ipc-channel".to_owned());
    outcome
}

fn overlap() -> Outcome {
    let mut outcome = empty("overlap");
    for exponent in 12..=22 {
        let bytes = 1_u64 << exponent;
        let share = 1.0 - 900.0 / bytes as f64;
        outcome.rows.push(row("hidden", "memferry", bytes, share, "ratio"));
        outcome.rows.push(row("hidden", "a thread per copy", bytes, share * share * 0.8, "ratio"));
    }
    for exponent in 6..=26 {
        let bytes = 1_u64 << exponent;
        let ns = 300.0 + bytes as f64 / 13.0;
        outcome.rows.push(row("time to done", "memferry", bytes, ns, "ns"));
        outcome.rows.push(row("time to done", "memcpy", bytes, bytes as f64 / 9.0 + 8.0, "ns"));
    }
    set(&mut outcome, &[("hot_64k", 0.88), ("hot_1m", 0.96), ("hot_4m", 0.985)]);
    outcome
}

fn overhead() -> Outcome {
    let mut outcome = empty("overhead");
    for (series, value) in
        [("memferry, submit", 118.0), ("memferry, check", 4.2), ("thread::spawn", 9_400.0)]
    {
        outcome.rows.push(row("cost to the caller", series, 0, value, "ns"));
    }
    for (series, value) in [("memferry", 512.0), ("floor", 380.0), ("channel of std", 8_200.0)] {
        outcome.rows.push(row("round trip", series, 8, value, "ns"));
    }
    set(&mut outcome, &[("submit_ns", 118.0), ("check_ns", 4.2), ("roundtrip_vs_floor", 1.35)]);
    outcome
}

fn pollution() -> Outcome {
    let mut outcome = empty("pollution");
    for (series, value) in [("memcpy", 1.74), ("memferry", 1.02)] {
        outcome.rows.push(row("slowdown of cached work", series, 0, value, "ratio"));
    }
    set(&mut outcome, &[("memcpy_slowdown", 1.74), ("ours_slowdown", 1.02)]);
    outcome
}

/// A bandwidth curve that rises with size, peaks in the caches, and falls to a memory-bound
/// plateau.
fn curve(bytes: u64, peak: f64, middle: f64, memory: f64) -> f64 {
    let start = bytes as f64 / (bytes as f64 + 700.0);
    let plateau = match bytes {
        0..=32_768 => peak,
        32_769..=1_048_576 => middle,
        _ => memory,
    };
    start * plateau
}

fn row(figure: &str, series: &str, bytes: u64, value: f64, unit: &str) -> Row {
    let rounds = [0.93, 0.96, 1.0, 1.03, 1.08].map(|factor| factor * value);
    Row::of_rounds(figure, series, bytes, unit, &rounds)
}

fn set(outcome: &mut Outcome, numbers: &[(&str, f64)]) {
    for (key, value) in numbers {
        outcome.summary.set(key, *value);
    }
}
