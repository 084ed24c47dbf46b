//! The report of `memferry run --profile`, as text and as HTML.

use std::fmt::Write as _;
use std::path::Path;

use memferry_bench::results::outcome::{Outcome, Row};
use memferry_bench::results::size;

use super::profile::{CallerTotal, Profile, SizeTotal};
use crate::report::{self, Origin, ReportView};

/// How many callers the text has.
const MAX_CALLERS: usize = 12;

/// The report for a terminal.
pub(super) fn text(profile: &Profile) -> String {
    let mut text = String::new();
    let calls: u64 = profile.functions.iter().map(|function| function.calls).sum();
    let bytes: u64 = profile.functions.iter().map(|function| function.bytes).sum();
    let share = share(profile.counted_seconds, profile.cpu_seconds);
    let processes = match profile.processes {
        1 => "1 process".to_owned(),
        count => format!("{count} processes"),
    };
    let _ = writeln!(
        text,
        "memferry: {} of {} in {processes}, about {} of {} processor time{share}",
        if calls == 1 { "1 call".to_owned() } else { format!("{calls} calls") },
        amount(bytes),
        time(profile.counted_seconds),
        time(profile.cpu_seconds),
    );
    if calls == 0 {
        let reason = "nothing was counted: the program makes no such call, the part of it that copies is \
                      linked statically, or its compiler replaces every copy by instructions";
        let _ = writeln!(text, "{reason}");
        return text;
    }
    let _ = writeln!(text, "\n{:<10} {:>14} {:>12} {:>10}", "function", "calls", "bytes", "time");
    for function in profile.functions.iter().filter(|function| function.calls > 0) {
        let (bytes, time) = (amount(function.bytes), time(function.seconds));
        let _ = writeln!(
            text,
            "{:<10} {:>14} {bytes:>12} {time:>10}",
            function.function, function.calls
        );
    }
    let _ = writeln!(text, "\n{:<10} {:>14} {:>12} {:>10}", "size from", "calls", "bytes", "time");
    for (from, calls, bytes, seconds) in by_size(&profile.sizes) {
        let (from, bytes, time) = (size::format(from), amount(bytes), time(seconds));
        let _ = writeln!(text, "{from:<10} {calls:>14} {bytes:>12} {time:>10}");
    }
    if !profile.callers.is_empty() {
        let _ =
            writeln!(text, "\n{:<10} {:>12} {:>10}  caller (sampled)", "function", "bytes", "time");
    }
    for caller in profile.callers.iter().take(MAX_CALLERS) {
        let (bytes, time) = (amount(caller.bytes), time(caller.seconds));
        let place = place(caller);
        let _ = writeln!(text, "{:<10} {bytes:>12} {time:>10}  {place}", caller.function);
    }
    let from_bytes = profile.shared_from_bytes;
    let _ = match profile.saved_seconds {
        _ if !profile.sizes.iter().any(|size| size.can_be_shared(from_bytes)) => writeln!(
            text,
            "\nNo copy or fill was large enough for `memferry run --copies` (from {} on).",
            size::format(profile.shared_from_bytes)
        ),
        saved => writeln!(
            text,
            "\n`memferry run --copies` would save about {}: copies and fills from {} on, with a second core.",
            time(saved),
            size::format(profile.shared_from_bytes)
        ),
    };
    text
}

/// Writes the report as a page: the classes of sizes as figures.
pub(super) fn write_html(profile: &Profile, path: &Path) -> anyhow::Result<()> {
    let mut outcome = Outcome::new("run");
    for size in &profile.sizes {
        let bytes = size.from_bytes.max(1);
        let mut row = |figure: &str, unit: &str, value: f64| {
            outcome.rows.push(Row::of_rounds(figure, size.function, bytes, unit, &[value]));
        };
        row("calls by size", "calls", size.calls as f64);
        row("time by size", "ns", size.seconds * 1e9);
    }
    outcome.summary.set("counted_ns", profile.counted_seconds * 1e9);
    outcome.summary.set("cpu_ns", profile.cpu_seconds * 1e9);
    outcome.notes.push(format!("The program: {}", profile.command));
    outcome.notes.extend(text(profile).lines().filter(|line| !line.is_empty()).map(str::to_owned));
    report::write(path, &[outcome], ReportView { origin: Origin::Recorded, bars: false })
}

/// The classes of all functions together: from, calls, bytes, seconds.
fn by_size(sizes: &[SizeTotal]) -> Vec<(u64, u64, u64, f64)> {
    let mut all = std::collections::BTreeMap::<u64, (u64, u64, f64)>::new();
    for size in sizes {
        let sum = all.entry(size.from_bytes).or_default();
        *sum = (sum.0 + size.calls, sum.1 + size.bytes, sum.2 + size.seconds);
    }
    all.into_iter().map(|(from, (calls, bytes, seconds))| (from, calls, bytes, seconds)).collect()
}

fn place(caller: &CallerTotal) -> String {
    let file = Path::new(&caller.module).file_name().unwrap_or_default().to_string_lossy();
    match &caller.symbol {
        Some(symbol) => format!("{file}: {symbol}"),
        None => format!("{file}+{:#x}", caller.offset),
    }
}

/// The part of the processor time. The time of calls has waits in it, so it may be more.
fn share(part: f64, whole: f64) -> String {
    match 100.0 * part / whole {
        percent if !percent.is_finite() => String::new(),
        percent if percent > 100.0 => " (the calls also waited)".into(),
        percent => format!(" ({:.0} %)", percent.abs()),
    }
}

fn amount(bytes: u64) -> String {
    match bytes {
        0..1_000 => format!("{bytes} B"),
        1_000..1_000_000 => format!("{:.1} KB", bytes as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", bytes as f64 / 1e6),
        _ => format!("{:.2} GB", bytes as f64 / 1e9),
    }
}

fn time(seconds: f64) -> String {
    match seconds {
        seconds if seconds >= 1.0 => format!("{seconds:.2} s"),
        seconds if seconds >= 1e-3 => format!("{:.2} ms", seconds * 1e3),
        // An empty sum is a negative zero.
        seconds => format!("{:.1} µs", seconds.abs() * 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::super::profile::FunctionTotal;
    use super::*;

    fn profile(saved_seconds: f64) -> Profile {
        let size = |function, from_bytes, calls, bytes| SizeTotal {
            function,
            from_bytes,
            calls,
            bytes,
            seconds: 0.25,
        };
        let function = FunctionTotal { function: "memcpy", calls: 12, bytes: 4096, seconds: 0.5 };
        let caller = CallerTotal {
            module: "/usr/lib/libx.so.1".into(),
            symbol: None,
            offset: 0x1234,
            function: "memcpy",
            calls: 1,
            bytes: 1,
            seconds: 0.1,
        };
        Profile {
            command: "true".into(),
            processes: 1,
            wall_seconds: 2.0,
            cpu_seconds: 2.0,
            counted_seconds: 0.5,
            saved_seconds,
            shared_from_bytes: 1 << 20,
            functions: vec![function],
            sizes: vec![
                size("memcpy", 16, 10, 160),
                size("memset", 16, 2, 3936),
                size("memcpy", 1 << 20, 1, 1 << 20),
            ],
            callers: vec![caller],
        }
    }

    #[test]
    fn the_text_has_totals_sizes_and_callers() {
        let text = text(&profile(0.2));
        assert!(
            text.contains("12 calls of 4.1 KB in 1 process, about 500.00 ms of 2.00 s"),
            "{text}"
        );
        assert!(text.contains("(25 %)") && text.contains("libx.so.1+0x1234"), "{text}");
        let line = text.lines().find(|line| line.starts_with("16 B")).unwrap();
        assert!(line.contains(" 12 ") && line.contains("4.1 KB"), "{line}");
        assert!(text.contains("would save about 200.00 ms"), "{text}");
    }

    #[test]
    fn whether_a_copy_was_large_enough_is_told_by_the_counts_and_not_by_the_times() {
        assert!(text(&profile(0.0)).contains("would save about 0.0 µs"));
        let mut small = profile(0.0);
        small.sizes.truncate(2);
        assert!(text(&small).contains("No copy or fill was large enough"), "{}", text(&small));
    }

    #[test]
    fn no_time_is_negative_and_no_share_is_above_the_whole() {
        assert_eq!((time(-0.0), share(-0.0, 1.0)), ("0.0 µs".into(), " (0 %)".into()));
        assert_eq!(share(3.0, 2.0), " (the calls also waited)");
        assert_eq!(share(1.0, 0.0), "");
    }

    #[test]
    fn the_page_has_a_figure_of_sizes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("page.html");
        let mut profile = profile(0.0);
        let larger = [64, 4096].map(|from_bytes| SizeTotal {
            function: "memcpy",
            from_bytes,
            calls: 3,
            bytes: 3 * from_bytes,
            seconds: 0.1,
        });
        profile.sizes.extend(larger);
        write_html(&profile, &path).unwrap();
        let page = std::fs::read_to_string(path).unwrap();
        for part in ["calls by size", "time by size", "<svg", "The program: true"] {
            assert!(page.contains(part), "{part}: {page}");
        }
    }
}
