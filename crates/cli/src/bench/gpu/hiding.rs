//! How much of a copy between registered memory hides behind computation on the caller's core, by
//! the definition of the bench `overlap`.

use std::time::Instant;

use anyhow::bail;

use super::cases::{Direction, PageSize, Way};
use super::memory::Host;
use super::rig::Rig;
use crate::bench::Effort;
use crate::bench::measure::compute;
use crate::bench::overlap::{Pace, overlap_rounds};

/// The computation takes a little longer than the copy: nobody but the GPU works on the copy, so
/// that it takes as long while the caller computes as while it waits.
pub(super) const COMPUTE_PER_COPY: f64 = 1.1;

/// The overlap of copies of so many bytes, round by round.
pub(super) fn measure(
    rig: &mut Rig,
    bytes: usize,
    effort: Effort,
    steps_per_ns: f64,
) -> anyhow::Result<Vec<f64>> {
    const USES: usize = 3;
    let mut host = rig.fresh(Direction::HostToHost, PageSize::Small, bytes)?;
    // What is refused is counted, and a note says so.
    let register = |rig: &Rig, host: &Host| -> Vec<_> {
        host.all()
            // SAFETY: the pages outlive the regions.
            .filter_map(|pages| unsafe { rig.ferry.register(pages.as_ptr(), pages.len()) }.ok())
            .collect()
    };
    let regions = register(rig, &host);
    for _ in 0..USES {
        rig.perform(Way::Ferry, &mut host)?;
    }
    rig.spoil(Way::Ferry, &mut host)?;
    let rounds = if effort == Effort::Full { 11 } else { 7 };
    let pace = Pace { rounds, repeat: ((256 << 20) / bytes).clamp(3, 15) };
    let rounds = overlap_rounds(pace, COMPUTE_PER_COPY, steps_per_ns, |steps| {
        let Host::Pair { source, target } = &host else { bail!("there is no target") };
        let start = Instant::now();
        // SAFETY: nobody touches the two before the wait is over.
        let transfer = unsafe { rig.start(source, target) }?;
        compute(steps);
        transfer.wait()?;
        Ok(start.elapsed().as_nanos() as f64)
    })?;
    rig.verify(Way::Ferry, &host)?;
    drop(regions);
    host.retire(&rig.ferry);
    Ok(rounds)
}
