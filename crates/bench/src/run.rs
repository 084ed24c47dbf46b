//! One run of a bench, with what disturbed it.

use anyhow::Context;
use memferry_sys::throttle::ThrottleMonitor;

use crate::host::load::{self, CpuLoad};
use crate::results::outcome::Outcome;
use crate::{Bench, Progress};

/// Runs a bench, records how far other programs or a quota disturbed it, and ends its progress, also if the bench fails.
pub fn measure(
    bench: &dyn Bench,
    progress: &dyn Progress,
    run: impl FnOnce() -> anyhow::Result<Outcome>,
) -> anyhow::Result<Outcome> {
    let (before, quota) = (CpuLoad::now(), ThrottleMonitor::start());
    let outcome = run();
    progress.finish();
    let mut outcome = outcome.with_context(|| format!("the bench {} failed", bench.name()))?;
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

    struct FailingBench;

    impl Bench for FailingBench {
        fn name(&self) -> &'static str {
            "overlap"
        }

        fn about(&self) -> &'static str {
            "Never works."
        }

        fn run(&self, _effort: Effort, _progress: &dyn Progress) -> anyhow::Result<Outcome> {
            bail!("out of luck")
        }
    }

    #[test]
    fn a_failing_bench_is_named_with_its_cause() {
        let progress = NoProgress;
        let run = || FailingBench.run(Effort::Full, &progress);
        let error = measure(&FailingBench, &progress, run).unwrap_err();
        assert_eq!(format!("{error:#}"), "the bench overlap failed: out of luck");
    }
}
