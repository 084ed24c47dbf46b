//! Share of a copy between registered host memory that is hidden behind computation on the caller's
//! core, by the definition of the bench `overlap`.

use std::time::Instant;

use anyhow::bail;

use super::cases::{CopyMethod, GpuCopyDirection, PageSize};
use super::fixture::GpuFixture;
use super::memory::HostBuffers;
use crate::Effort;
use crate::copy::overlap::{OverlapBudget, overlap_rounds};
use crate::harness::compute;

/// Ratio of computation to copy. Only the GPU copies, so a copy takes as long while the caller
/// computes as while it waits, and a computation 10 % longer is enough.
pub(super) const COMPUTE_PER_COPY: f64 = 1.1;

/// Measures the overlap of copies of `bytes`, round by round.
pub(super) fn measure(
    rig: &mut GpuFixture,
    bytes: usize,
    effort: Effort,
    steps_per_ns: f64,
) -> anyhow::Result<Vec<f64>> {
    const USES: usize = 3;
    let mut host = rig.fresh_buffers(GpuCopyDirection::HostToHost, PageSize::Small, bytes)?;
    // A refused registration is counted, and a note reports it.
    let register = |rig: &GpuFixture, host: &HostBuffers| -> Vec<_> {
        host.all()
            // SAFETY: the pages outlive the regions.
            .filter_map(|pages| unsafe { rig.ferry.register(pages.as_ptr(), pages.len()) }.ok())
            .collect()
    };
    let regions = register(rig, &host);
    for _ in 0..USES {
        rig.copy(CopyMethod::Ferry, &mut host)?;
    }
    rig.poison(CopyMethod::Ferry, &mut host)?;
    let rounds = if effort == Effort::Full { 11 } else { 7 };
    let pace = OverlapBudget { rounds, repeat: ((256 << 20) / bytes).clamp(3, 15) };
    let rounds = overlap_rounds(pace, COMPUTE_PER_COPY, steps_per_ns, |steps| {
        let HostBuffers::Pair { source, target } = &host else { bail!("there is no target") };
        let start = Instant::now();
        // SAFETY: no thread accesses the two ranges before the wait returns.
        let transfer = unsafe { rig.start(source, target) }?;
        compute(steps);
        transfer.wait()?;
        Ok(start.elapsed().as_nanos() as f64)
    })?;
    rig.verify(CopyMethod::Ferry, &host)?;
    drop(regions);
    host.unmap(&rig.ferry);
    Ok(rounds)
}
