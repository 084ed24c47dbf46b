//! One run of a bench, with what disturbed it.

use anyhow::Context;
use memferry_sys::throttle::ThrottleMonitor;

use crate::host::load::{self, CpuLoad};
use crate::results::outcome::Outcome;
use crate::{Bench, Progress};

/// Runs a bench, records how far other programs or a quota disturbed it, and ends its progress, also if the bench fails.
pub fn measure(
    bench: &Bench,
    progress: &dyn Progress,
    run: impl FnOnce() -> anyhow::Result<Outcome>,
) -> anyhow::Result<Outcome> {
    let (before, quota) = (CpuLoad::now(), ThrottleMonitor::start());
    let outcome = run();
    progress.finish();
    let mut outcome = outcome.with_context(|| format!("the bench {} failed", bench.name))?;
    outcome.busy = before.and_then(CpuLoad::others_share_since);
    outcome.throttled = Some(quota.share());
    if let Some(disturbance) = outcome.disturbance() {
        outcome.notes.push(load::warning(disturbance));
    }
    Ok(outcome)
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;
    use crate::Effort;
    use crate::registry::NoProgress;

    #[test]
    fn a_failing_bench_is_named_with_its_cause() {
        let bench = Bench::new("overlap", "Never works.", |_, _, _| bail!("out of luck"));
        let run = || bench.run(Effort::Full, &NoProgress);
        let error = measure(&bench, &NoProgress, run).unwrap_err();
        assert_eq!(format!("{error:#}"), "the bench overlap failed: out of luck");
    }
}
