//! The text of `memferry doctor`: one line per subject or per check, then what is ready and how to
//! get more.

use memferry_bench::results::size;

use super::{Check, DO_AS_SAID, Diagnosis, Need, Status, Subject};
use crate::show::Paint;

impl Subject<'_> {
    /// The summaries of the checks that make this subject ready. Empty if it is not ready.
    fn summaries(&self) -> Vec<&str> {
        let passed = self.checks.iter().filter(|check| check.status == Status::Ok);
        passed.filter_map(|check| check.summary.as_deref()).collect()
    }

    /// The check that best explains why this subject is not ready: the first that failed, else a
    /// missing option, preferably the one with the title of the subject, else the first warning.
    fn obstacle(&self) -> Option<&Check> {
        let absent = self.checks.iter().filter(|check| check.is_absent_option());
        let first = |wanted: fn(&Check) -> bool| self.checks.iter().find(|check| wanted(check));
        first(|check| check.status == Status::Missing && !check.is_absent_option())
            .or_else(|| absent.clone().find(|check| check.name == self.title))
            .or_else(|| absent.clone().next())
            .or_else(|| first(|check| check.status == Status::Warn))
    }

    fn sign(&self, paint: Paint) -> String {
        let counts = |check: &&Check| check.status != Status::Ok && !check.is_absent_option();
        match (self.summaries().is_empty(), self.checks.iter().any(|check| counts(&check))) {
            (false, false) => paint.good("✓"),
            (false, true) => paint.bad("!"),
            (true, _) => self.obstacle().map_or_else(|| paint.dim("–"), |check| sign(check, paint)),
        }
    }

    /// The one line of this subject.
    fn line(&self) -> String {
        let summaries = self.summaries();
        match self.obstacle() {
            _ if !summaries.is_empty() => summaries.join("; "),
            Some(check) => short(check).to_owned(),
            None => "not tried".to_owned(),
        }
    }
}

/// The first part of a detail: an error without its advice, or only the name of a missing option. The
/// whole detail if the fix is that advice.
fn short(check: &Check) -> &str {
    let detail = check.detail.split("; ").next().unwrap_or_default();
    match &check.fix {
        _ if check.is_absent_option() => detail.split(": ").next().unwrap_or_default(),
        Some(fix) if fix.starts_with(DO_AS_SAID) => &check.detail,
        _ => detail,
    }
}

/// One line per subject.
pub(super) fn overview(diagnosis: &Diagnosis, paint: Paint) -> String {
    let subjects = diagnosis.subjects();
    let width = subjects.iter().map(|subject| subject.name.len()).max().unwrap_or(0);
    let machine = &diagnosis.machine;
    let mut text = format!(
        "{}, {} {}, {}, Linux {}\n\n",
        machine.cpu,
        machine.cores,
        if machine.cores == 1 { "core" } else { "cores" },
        size::format(machine.memory_bytes),
        machine.kernel
    );
    for subject in &subjects {
        let (sign, title) = (subject.sign(paint), paint.bold(&format!("{:<width$}", subject.name)));
        text.push_str(&format!("  {sign} {title}  {}\n", subject.line()));
    }
    text
}

/// One line per check, with its notes and its fixes.
pub(super) fn details(diagnosis: &Diagnosis, paint: Paint) -> String {
    let facts = diagnosis.machine.info();
    let names = facts.iter().map(|(name, _)| *name);
    let width =
        names.chain(diagnosis.all().map(|check| check.name)).map(str::len).max().unwrap_or(0);
    let mut text = format!("{}\n", paint.bold("this machine"));
    for (name, fact) in &facts {
        text.push_str(&format!("    {}  {fact}\n", paint.dim(&format!("{name:<width$}"))));
    }
    for Subject { title, checks, .. } in diagnosis.subjects() {
        text.push_str(&format!("\n{}\n", paint.bold(title)));
        checks.iter().for_each(|check| text.push_str(&line(check, width, paint)));
    }
    text
}

fn line(check: &Check, width: usize, paint: Paint) -> String {
    let sign = sign(check, paint);
    let mut text = format!("  {sign} {:<width$}  {}\n", check.name, check.detail);
    for note in &check.notes {
        text.push_str(&format!("    {:<width$}    {note}\n", ""));
    }
    if let Some(fix) = &check.fix {
        text.push_str(&format!("    {:<width$}  fix: {}\n", "", paint.bold(fix)));
    }
    if let Some(other) = &check.other_fix {
        text.push_str(&format!("    {:<width$}  or:  {other}\n", ""));
    }
    text
}

fn sign(check: &Check, paint: Paint) -> String {
    match check.status {
        _ if check.is_absent_option() => paint.dim("–"),
        Status::Ok => paint.good("✓"),
        Status::Warn => paint.bad("!"),
        Status::Missing => paint.bad("✗"),
    }
}

/// What is ready, and the fixes that would add more. Fixes for hardware that this machine does not
/// have are left out.
pub(super) fn conclusion(diagnosis: &Diagnosis, paint: Paint) -> String {
    let subjects = diagnosis.subjects();
    let ready: Vec<&str> = subjects
        .iter()
        .filter(|subject| !subject.summaries().is_empty())
        .map(|subject| subject.name)
        .collect();
    let ready = if ready.is_empty() { "nothing".to_owned() } else { ready.join(", ") };
    let mut text = format!("\n{} {ready}\n", paint.bold("ready:"));
    let mut fixes: Vec<(&str, &str)> = Vec::new();
    for check in subjects.iter().flat_map(|subject| subject.checks) {
        let is_advised = check.status != Status::Ok && check.need != Need::OptionalHardware;
        let Some(fix) = check.fix.as_deref().filter(|_| is_advised) else { continue };
        if !fixes.iter().any(|(_, known)| *known == fix) {
            fixes.push((check.name, fix));
        }
    }
    if !fixes.is_empty() {
        let width = fixes.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        text.push_str(&format!(
            "{} (`!` works and could do more, `✗` does not work, `–` is not here)\n",
            paint.bold("for more:")
        ));
        for (name, fix) in fixes {
            text.push_str(&format!("  {name:<width$}  {fix}\n"));
        }
    }
    text
}

#[cfg(test)]
mod tests;
