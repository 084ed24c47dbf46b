//! The speed of a device of this machine against libc's memcpy. The device is the only engine of a
//! ferry, and both copy in the same rounds. Without a device nothing is measured.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, ensure};
use memferry::engine::contract::OpenOptions;
use memferry::engine::{ChannelStatistics, Engine, factories};
use memferry::{BatchItem, EngineSelection, Ferry, Options, Region, Request};
use memferry_sys::Pages;
use memferry_sys::settings;
use memferry_sys::vfio::PciBus;
use memferry_sys::vfio::pci::{DSA, IOAT, PciId};

use super::memory::{self, ALIGNED, Alignment, ODD};
use crate::Effort;
use crate::harness::{self, Budget, Candidate, Failure, Harness, Role, Sample, Samples};
use crate::harness::{set, warm_up_iterations};
use crate::results::outcome::Outcome;

/// The maximum time until finished descriptors are counted.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(10);
/// The number of copies of a batch.
const BATCH: usize = 64;

/// A kind of device that copies.
#[derive(Debug)]
pub(super) struct DeviceKind {
    /// The name for display.
    pub(super) name: &'static str,
    /// The name of the engine and of its factory.
    engine: &'static str,
    ids: &'static [PciId],
    /// The keys of aligned copies: single ones of 64 KiB and of 4 MiB, and batches of 4 KiB.
    keys: [&'static str; 3],
}

/// The kinds that are compared with memcpy.
pub(super) const KINDS: [DeviceKind; 2] = [
    DeviceKind {
        name: "DSA",
        engine: "dsa",
        ids: DSA,
        keys: ["dsa_64k_vs_memcpy", "dsa_4m_vs_memcpy", "dsa_batch_4k_vs_memcpy"],
    },
    DeviceKind {
        name: "I/OAT",
        engine: "ioat",
        ids: IOAT,
        keys: ["ioat_64k_vs_memcpy", "ioat_4m_vs_memcpy", "ioat_batch_4k_vs_memcpy"],
    },
];

/// What came of the search for a device.
#[derive(Debug)]
enum DeviceSearch {
    Opened(Arc<dyn Engine>),
    /// Nothing is measured, for this reason.
    Absent(String),
}

impl DeviceKind {
    /// Measures the device that the environment selects, or records that there is none.
    pub(super) fn measure(&self, outcome: &mut Outcome, effort: Effort) -> anyhow::Result<()> {
        let factory = factories().iter().find(|factory| factory.name() == self.engine);
        let variable = factory.context("an engine without a factory")?.variable();
        let value =
            settings::value_of(variable).map(|value| value.to_string_lossy().trim().to_owned());
        let is_present = !PciBus::default().find(self.ids).is_empty();
        match self.open(value.as_deref().unwrap_or("off"), is_present)? {
            DeviceSearch::Opened(engine) => self.compare(engine, outcome, effort),
            DeviceSearch::Absent(reason) => {
                outcome.missing.push(format!("{} against memcpy ({reason})", self.name));
                Ok(())
            }
        }
    }

    /// Opens what the text selects.
    fn open(&self, text: &str, is_present: bool) -> anyhow::Result<DeviceSearch> {
        let name = self.name;
        let factory = factories().iter().find(|factory| factory.name() == self.engine);
        let factory = factory.context("an engine without a factory")?;
        let variable = factory.variable();
        let selection = factory
            .parse(text)
            .with_context(|| format!("{variable} is `{text}`, and not {}", factory.expected()))?;
        let options = OpenOptions { by_environment: true, ..OpenOptions::default() };
        let opened = factory.open(&selection, &options)?.into_iter().next();
        Ok(match (opened, selection) {
            (Some(choice), _) => DeviceSearch::Opened(choice.engine),
            _ if !is_present => DeviceSearch::Absent(format!("no {name} device on this machine")),
            (None, EngineSelection::Off) => DeviceSearch::Absent(format!(
                "there is a device, and {variable}=auto selects what of it may be opened"
            )),
            (None, _) => DeviceSearch::Absent(
                "there is a device, and none may be opened: `memferry doctor --verbose` has the \
                 commands"
                    .into(),
            ),
        })
    }

    /// Compares an engine with memcpy: rows of all sizes, and the keys.
    pub(super) fn compare(
        &self,
        engine: Arc<dyn Engine>,
        outcome: &mut Outcome,
        effort: Effort,
    ) -> anyhow::Result<()> {
        let tuning = engine.tuning();
        let ferry = memory::ferry_over(engine)?;
        let [small, large, batch] = self.keys;
        for shape in shapes(effort) {
            let samples = self.interleave(&ferry, shape, effort)?;
            let figure = match shape.count {
                1 => format!("{} against memcpy: single copies", self.name),
                count => format!("{} against memcpy: batches of {count}", self.name),
            };
            let moved = shape.total() as u64;
            outcome.rows.extend(samples.bandwidth_rows(&figure, shape.bytes as u64, moved));
            for Failure { series, reason, .. } in samples.failures() {
                let missing = format!("{series}, {figure} ({reason})");
                outcome.missing.push(missing);
            }
            let key = match (shape.count, shape.bytes) {
                (1, SMALL_KEY_BYTES) => small,
                (1, MAX_BYTES) => large,
                (BATCH, MIN_BYTES) => batch,
                _ => continue,
            };
            let ratio = samples.ratio(&series("memferry", ALIGNED), &series("memcpy", ALIGNED));
            set(&mut outcome.summary, key, ratio);
        }
        let facts = tuning.iter().map(|fact| {
            let origin = fact.origin.name();
            format!("{} {} ({origin})", fact.name, fact.text)
        });
        let facts: Vec<_> = facts.collect();
        let goes_by = match facts.is_empty() {
            true => String::new(),
            false => format!(" Its engine goes by: {}.", facts.join(", ")),
        };
        outcome.notes.push(format!(
            "{} against memcpy: one queue of the device of this machine is the only engine of a ferry, \
             and its caller waits for every copy or batch without helping. The memory is registered \
             once, and used again for every copy: memcpy finds short ones in the caches. Each copy of \
             a batch goes to other addresses. What was copied is compared byte by byte, before, \
             between and after the timed rounds, and the device itself has to have moved it.{goes_by}",
            self.name
        ));
        Ok(())
    }

    fn interleave(
        &self,
        ferry: &Ferry,
        shape: CopyShape,
        effort: Effort,
    ) -> anyhow::Result<Samples> {
        let mut candidates = Vec::new();
        for alignment in [ALIGNED, ODD] {
            let device = DeviceMover { ferry: ferry.clone(), engine: self.engine };
            candidates.push(Copies::new(shape, alignment, Some(device))?);
            candidates.push(Copies::new(shape, alignment, None)?);
        }
        Ok(Harness::new(Budget::of_calls(effort)).interleave(&mut candidates))
    }
}

/// The series of an alignment: `memferry, page-aligned`, `memcpy, odd target`.
fn series(mover: &str, alignment: Alignment) -> String {
    alignment.series.replacen("memferry", mover, 1)
}

/// The smallest and the largest copy.
const MIN_BYTES: usize = 4 << 10;
const MAX_BYTES: usize = 4 << 20;
/// The size of a key between them.
const SMALL_KEY_BYTES: usize = 64 << 10;

/// The copies of an iteration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct CopyShape {
    /// The bytes of each copy.
    bytes: usize,
    /// The number of copies: 1, or that of a batch.
    count: usize,
}

impl CopyShape {
    fn total(self) -> usize {
        self.bytes * self.count
    }
}

/// Single copies of all sizes, and batches that are not larger than the largest of them.
fn shapes(effort: Effort) -> Vec<CopyShape> {
    let shifts: &[u32] = match effort {
        Effort::Brief => &[12, 16, 22],
        Effort::Quick => &[12, 14, 16, 18, 20, 22],
        Effort::Full => &[12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22],
    };
    let of_count = |count| shifts.iter().map(move |shift| CopyShape { bytes: 1 << shift, count });
    of_count(1).chain(of_count(BATCH).filter(|shape| shape.total() <= MAX_BYTES)).collect()
}

/// A ferry whose only engine is the device.
struct DeviceMover {
    ferry: Ferry,
    engine: &'static str,
}

impl DeviceMover {
    /// The counters of the device when nothing is in flight. A descriptor is counted after its transfer is
    /// complete.
    fn statistics(&self) -> ChannelStatistics {
        let start = Instant::now();
        loop {
            let statistics = self.ferry.statistics().engine(self.engine);
            if statistics.completed >= statistics.submitted || start.elapsed() > SETTLE_TIMEOUT {
                return statistics;
            }
            thread::yield_now();
        }
    }
}

/// Copies of one shape, by the device or by memcpy, between memory of their own.
struct Copies {
    series: String,
    shape: CopyShape,
    target_offset: usize,
    items: Vec<BatchItem>,
    /// `None`: memcpy.
    device: Option<DeviceMover>,
    // Dropped before the memory.
    regions: Vec<Region>,
    source: Pages,
    target: Pages,
}

impl Copies {
    fn new(
        shape: CopyShape,
        alignment: Alignment,
        device: Option<DeviceMover>,
    ) -> anyhow::Result<Self> {
        let target_offset = alignment.target_offset;
        let source = memory::patterned(shape.total())?;
        let target = Pages::new(shape.total() + target_offset)?;
        let item = |number: usize| {
            let at = number * shape.bytes;
            let to = target.as_ptr().wrapping_add(target_offset + at);
            BatchItem::copy(source.as_ptr().wrapping_add(at), to, shape.bytes)
        };
        Ok(Self {
            series: series(if device.is_some() { "memferry" } else { "memcpy" }, alignment),
            items: (0..shape.count).map(item).collect(),
            shape,
            target_offset,
            device,
            regions: Vec::new(),
            source,
            target,
        })
    }

    fn copy_once(&mut self) -> anyhow::Result<()> {
        let CopyShape { bytes, count } = self.shape;
        let target = &mut self.target.as_mut_slice()[self.target_offset..];
        let Some(DeviceMover { ferry, .. }) = &self.device else {
            let source = self.source.as_slice().chunks_exact(bytes);
            for (source, target) in source.zip(target.chunks_exact_mut(bytes)) {
                harness::memcpy(target, source);
            }
            return Ok(());
        };
        let options = Options::new().no_caller_assist();
        if count == 1 {
            let request = Request::copy(self.source.as_ptr(), target.as_mut_ptr(), bytes);
            // SAFETY: both sides belong to this value, and the call waits for the completion.
            unsafe { ferry.start_raw(request.with(options)) }?.wait()?;
        } else {
            // SAFETY: as above; the items are inside both sides, and no two of them overlap.
            unsafe { ferry.start_many_raw(&self.items, options) }?.wait()?;
        }
        Ok(())
    }

    /// Requires that the target has the bytes of the source.
    fn compare(&self) -> anyhow::Result<()> {
        let (before, target) = self.target.as_slice().split_at(self.target_offset);
        ensure!(before.iter().all(|&byte| byte == 0), "a copy wrote before its target");
        let is_same = target[..self.shape.total()] == *self.source.as_slice();
        ensure!(is_same, "a copy came out wrong");
        Ok(())
    }

    /// Copies once into a cleared target, compares, and requires that the device did all of it.
    fn copy_and_compare(&mut self) -> anyhow::Result<()> {
        self.target.as_mut_slice().fill(0);
        let before = self.device.as_ref().map(DeviceMover::statistics);
        self.copy_once()?;
        self.compare()?;
        if let (Some(before), Some(after)) =
            (before, self.device.as_ref().map(DeviceMover::statistics))
        {
            let (moved, total) = (after.bytes - before.bytes, self.shape.total() as u64);
            let failed = after.failed - before.failed;
            ensure!(
                moved == total && failed == 0,
                "the device moved {moved} of {total} bytes, and {failed} descriptors failed"
            );
        }
        Ok(())
    }

    fn register(&mut self) -> anyhow::Result<()> {
        let Some(DeviceMover { ferry, .. }) = &self.device else { return Ok(()) };
        for pages in [&self.source, &self.target] {
            // SAFETY: the memory stays mapped until this value is dropped, which drops the regions
            // first; every copy is waited for.
            let region = unsafe { ferry.register(pages.as_ptr(), pages.len()) };
            self.regions.push(region.map_err(|error| anyhow!("{error}"))?);
        }
        Ok(())
    }
}

impl Candidate for Copies {
    fn series(&self) -> &str {
        &self.series
    }

    fn role(&self) -> Role {
        if self.device.is_some() { Role::Memferry } else { Role::Peer }
    }

    fn prepare(&mut self) -> Result<(), String> {
        let mut prepare = || {
            self.register()?;
            self.copy_and_compare()?;
            // What is compared after the last round is what the timed copies wrote.
            self.target.as_mut_slice().fill(0);
            anyhow::Ok(())
        };
        prepare().map_err(|error| format!("{error:#}"))
    }

    fn run(&mut self, iterations: u64) -> Result<Sample, String> {
        let mut copy = || self.copy_once().map_err(|error| format!("{error:#}"));
        for _ in 0..warm_up_iterations(iterations) {
            copy()?;
        }
        let start = Instant::now();
        for _ in 0..iterations {
            copy()?;
        }
        let total_ns = start.elapsed().as_nanos() as f64;
        Ok(Sample::of_total(total_ns).per_iteration(iterations))
    }

    fn verify(&mut self) -> Result<(), String> {
        let verified = self.compare().and_then(|()| self.copy_and_compare());
        verified.map_err(|error| format!("{error:#}"))
    }
}

#[cfg(test)]
mod tests {
    use memferry::engine::dsa::DsaEngine;
    use memferry::engine::ioat::IoatEngine;
    use memferry::engine::testing::dsa_model::{DsaModel, IdxdModel, IdxdModelOptions};
    use memferry::engine::testing::ioat_model::IoatModel;
    use memferry::engine::testing::polled::PolledEngine;

    use super::*;
    use crate::results::sample;

    const DSA_KIND: &DeviceKind = &KINDS[0];
    const IOAT_KIND: &DeviceKind = &KINDS[1];

    fn outcome_of(kind: &DeviceKind, engine: Arc<dyn Engine>) -> Outcome {
        let mut outcome = sample::empty("devices");
        (outcome.rows, outcome.notes, outcome.missing) = Default::default();
        kind.compare(engine, &mut outcome, Effort::Brief).unwrap();
        outcome
    }

    fn require_rows_and_keys(kind: &DeviceKind, outcome: &Outcome) {
        assert!(outcome.missing.is_empty(), "{:?}", outcome.missing);
        for key in kind.keys {
            assert!(outcome.summary.get(key).is_some_and(|ratio| ratio > 0.0), "{key}");
        }
        // Five shapes, each with two alignments, by the device and by memcpy.
        assert_eq!(outcome.rows.len(), 5 * 4, "{:?}", outcome.rows);
        for series in ["memferry, page-aligned", "memcpy, odd target"] {
            let rows = outcome.rows.iter().filter(|row| row.series == series);
            assert_eq!(rows.filter(|row| row.value > 0.0).count(), 5, "{series}");
        }
        assert!(outcome.notes[0].contains("only engine"), "{:?}", outcome.notes);
    }

    #[test]
    fn a_queue_of_the_kernel_is_compared_with_memcpy() {
        let model = IdxdModel::new(IdxdModelOptions::default()).unwrap();
        let engine = Arc::new(DsaEngine::over_idxd_model(model).unwrap());
        let outcome = outcome_of(DSA_KIND, engine);
        require_rows_and_keys(DSA_KIND, &outcome);
        assert!(outcome.notes[0].contains("descriptor_ns"), "{:?}", outcome.notes);
    }

    #[test]
    fn devices_of_vfio_are_compared_with_memcpy() {
        let model = DsaModel::new();
        let engine = Arc::new(DsaEngine::over_model(model.clone()).unwrap());
        require_rows_and_keys(DSA_KIND, &outcome_of(DSA_KIND, engine));
        let violations = model.protocol_violations();
        assert!(violations.is_empty(), "{violations:?}");
        let model = IoatModel::builder().contiguous(true).build();
        let engine = Arc::new(IoatEngine::over_model(model.clone()).unwrap());
        require_rows_and_keys(IOAT_KIND, &outcome_of(IOAT_KIND, engine));
        let violations = model.protocol_violations();
        assert!(violations.is_empty(), "{violations:?}");
    }

    #[test]
    fn what_the_device_did_not_do_is_no_result() {
        // An engine of another name: its statistics are not found, so the device moved nothing.
        let outcome = outcome_of(DSA_KIND, Arc::new(PolledEngine::new()));
        assert!(outcome.rows.iter().all(|row| row.series.starts_with("memcpy")));
        assert_eq!(outcome.summary.get("dsa_4m_vs_memcpy"), None);
        let failed = outcome.missing.iter().all(|missing| {
            missing.starts_with("memferry") && missing.contains("the device moved 0 of")
        });
        assert!(failed && outcome.missing.len() == 10, "{:?}", outcome.missing);
    }

    #[test]
    fn without_a_device_the_reason_is_recorded() {
        for kind in &KINDS {
            let absent = |text, is_present| match kind.open(text, is_present).unwrap() {
                DeviceSearch::Absent(reason) => reason,
                DeviceSearch::Opened(engine) => panic!("{}", engine.name()),
            };
            let none = format!("no {} device on this machine", kind.name);
            assert_eq!(absent("off", false), none);
            assert!(absent("off", true).contains("=auto selects"));
        }
        assert!(DSA_KIND.open("banana", false).is_err());
        assert!(DSA_KIND.open("wq250.250", false).is_err());
        assert!(IOAT_KIND.open("0000:ff:1f.7", true).is_err());
    }

    #[test]
    fn every_effort_has_the_shapes_of_the_keys() {
        for effort in [Effort::Brief, Effort::Quick, Effort::Full] {
            let shapes = shapes(effort);
            for (bytes, count) in [(SMALL_KEY_BYTES, 1), (MAX_BYTES, 1), (MIN_BYTES, BATCH)] {
                assert!(shapes.contains(&CopyShape { bytes, count }), "{effort:?}");
            }
            assert!(shapes.iter().all(|shape| shape.total() <= MAX_BYTES));
        }
    }
}
