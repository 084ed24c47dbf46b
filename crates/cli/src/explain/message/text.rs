//! The explanation of a message as text.

use memferry_bench::results::{number, size};

use super::{Case, Explanation, IfAhead, IfNotResident, Memory};
use crate::show::{Paint, columns};

pub(super) fn render(explanation: &Explanation, paint: Paint) -> String {
    let several = explanation.cases.iter().any(|case| case.cores != explanation.cases[0].cores);
    // The locality of the cores is named only if the cases differ in it.
    let cores = |name: &str| if several { format!(", cores {name}") } else { String::new() };
    let title = format!("a message of {}", size::format(explanation.bytes));
    let mut text = format!("{}\n", paint.bold(&title));
    for case in &explanation.cases {
        let permission = if case.permitted { "" } else { ", access to each other not permitted" };
        let title = format!("{} memory{permission}{}", case.memory.name(), cores(case.cores));
        text += &format!("\n  {}\n    path      {}\n", paint.bold(&title), case.path);
        text += &format!("    because   {}\n", case.reason);
        if let Some(estimate) = case.estimate_us {
            text += &format!("    estimate  {}\n", number::duration(estimate * 1000.0));
        }
        text += &format!("    prefaults {}\n", case.prefault);
        text += &if_ahead(case);
        text += &if_not_resident(case);
    }
    if explanation.switched_off {
        text += "\n  MEMFERRY_CMA=off is set: access to each other is not permitted.\n";
    }
    text += &format!("\n  {}\n", paint.bold("what each path costs"));
    let mut lines = vec![["path", "start-up", "GB/s", "this message"].map(str::to_owned).to_vec()];
    lines.extend(explanation.lines.iter().map(|line| {
        let memory = if line.memory == Memory::Shareable { ", shareable" } else { "" };
        let time = |ns: Option<f64>| ns.map_or("–".into(), number::duration);
        vec![
            format!("{}{memory}{}", line.path, cores(line.cores)),
            time(line.startup_ns),
            line.gb_per_s.map_or("–".into(), number::short),
            time(line.estimate_us.map(|us| us * 1000.0)),
        ]
    }));
    push(&mut text, &columns::align(&lines, true));
    text += "    Offload is a copy inside the receiver: see `memferry explain SIZE`.\n";
    text += &format!("\n  {}\n", paint.bold("limits"));
    let lines: Vec<_> = (explanation.limits.iter())
        .map(|limit| {
            let name = format!("{}{}", limit.name, cores(limit.cores));
            (vec![name, size_or_never(limit.bytes)], &limit.origin)
        })
        .collect();
    let (columns, origins): (Vec<_>, Vec<_>) = lines.into_iter().unzip();
    let aligned = columns::align(&columns, true);
    let with_origin: Vec<_> =
        aligned.iter().zip(origins).map(|(line, origin)| format!("{line}  {origin}")).collect();
    push(&mut text, &with_origin);
    text += &format!(
        "    Two processes leave {} core(s) for offload. Each limit can be set by the builder or as \
         MEMFERRY_EAGER_BYTES and so on.\n",
        explanation.spare_cores
    );
    text += &format!("\n  {} ({})\n", paint.bold("what the planner goes by"), explanation.profile);
    let lines: Vec<_> = (explanation.costs.iter())
        .map(|cost| {
            let origin = if cost.measured { "measured" } else { "built in" };
            let name = format!("{}{}", cost.name, cores(cost.cores));
            vec![name, number::short(cost.value), origin.to_owned()]
        })
        .collect();
    push(&mut text, &columns::align(&lines, true));
    text
}

/// The path if the receive was posted ahead; empty if it is the same.
fn if_ahead(case: &Case) -> String {
    let IfAhead { path, reason } = &case.if_ahead;
    if *path == case.path {
        return String::new();
    }
    format!(
        "    if the receive was posted ahead\n      path      {path}\n      because   {reason}\n"
    )
}

/// The differences if the target is not resident; empty if there are none.
fn if_not_resident(case: &Case) -> String {
    let IfNotResident { path, reason, prefault: brings_in } = &case.if_absent;
    let mut text = String::new();
    if *path != case.path {
        text += &format!("      path      {path}\n      because   {reason}\n");
    }
    if *brings_in != case.prefault {
        text += &format!("      prefaults {brings_in}\n");
    }
    if text.is_empty() { text } else { format!("    if the target is not resident\n{text}") }
}

fn push(text: &mut String, lines: &[String]) {
    for line in lines {
        text.push_str(&format!("    {}\n", line.trim_end()));
    }
}

fn size_or_never(bytes: u64) -> String {
    if bytes == u64::MAX { "never".into() } else { size::format(bytes) }
}

impl Memory {
    fn name(self) -> &'static str {
        match self {
            Self::Ordinary => "ordinary",
            Self::Shareable => "shareable",
        }
    }
}
