//! Chains of ordered copies, each of which reads what the one before it wrote: fences inside a batch,
//! and what happens when a link of the chain faults or fails.

use std::sync::Arc;
use std::time::Duration;

use memferry_engine::dsa::DsaEngine;
use memferry_engine::testing::dsa_model::{DsaFaults, DsaModel, IdxdModel, IdxdModelOptions};
use memferry_engine::testing::ioat_model::FaultSchedule;
use memferry_engine::{Completion, Descriptor, ExecutionError, Opcode};
use memferry_sys::pages::{ReservedRange, page_bytes};

use super::rig::{BYTES, DsaRig};

const LINK_BYTES: usize = 4096;
const LINKS: usize = 6;

/// A queue of the kernel whose memory is resident.
struct ChainRig {
    model: Arc<IdxdModel>,
    rig: DsaRig,
}

/// A chain that was submitted in one batch.
struct RunningChain(Vec<Arc<Completion>>);

impl ChainRig {
    fn new(options: IdxdModelOptions) -> Self {
        let model = IdxdModel::new(options).unwrap();
        let engine = DsaEngine::over_idxd_model(model.clone()).unwrap();
        let rig = DsaRig::new(Arc::new(engine));
        rig.copy_all([(0, BYTES)]);
        Self { model, rig }
    }

    fn device(&self) -> &DsaModel {
        self.model.device()
    }

    fn slot(&self, number: usize) -> u64 {
        self.rig.target.as_ptr() as u64 + (number * LINK_BYTES) as u64
    }

    /// The descriptors of a chain that begins with these bytes of the source: the first link copies
    /// them to the first slot of the target, each other one copies a slot to the next.
    fn chain(&self, at: usize) -> (Vec<Descriptor>, RunningChain) {
        let (mut descriptors, mut completions) = (Vec::new(), Vec::<Arc<Completion>>::new());
        for link in 0..LINKS {
            let source = match link {
                0 => self.rig.source.as_ptr() as u64 + at as u64,
                _ => self.slot(link - 1),
            };
            let after = completions.last().cloned();
            let completion = Arc::new(Completion::whole().ordered_after(after));
            descriptors.push(descriptor(source, self.slot(link), &completion, link > 0));
            completions.push(completion);
        }
        (descriptors, RunningChain(completions))
    }

    /// Executes a chain that must succeed.
    fn run(&self, at: usize) {
        let (descriptors, RunningChain(completions)) = self.chain(at);
        self.rig.submit(descriptors);
        self.rig.finish();
        for completion in &completions {
            assert!(matches!(completion.outcome(), Some(Ok(_))), "{:?}", completion.outcome());
        }
        let expected = &self.rig.source.as_slice()[at..at + LINK_BYTES];
        for (link, slot) in self.rig.target.as_slice().chunks(LINK_BYTES).take(LINKS).enumerate() {
            assert!(slot == expected, "link {link}");
        }
    }

    /// Executes chains under faults; returns what the model counted, and how many descriptors the
    /// processor executed, of all chains.
    fn run_with(&self, faults: impl Fn(u64) -> DsaFaults, chains: u64) -> [u64; 4] {
        let count = || {
            let (model, channel) = (self.device().counters(), self.rig.channel.statistics());
            [model.doorbells, model.fences, model.abandoned, channel.failed]
        };
        let before = count();
        for number in 0..chains {
            self.device().set_faults(faults(number));
            self.run(1000 * (number as usize + 1));
        }
        self.device().set_faults(DsaFaults::default());
        std::array::from_fn(|index| count()[index] - before[index])
    }

    fn assert_clean(self) {
        drop(self.rig);
        assert_eq!(self.model.device().protocol_violations(), Vec::<String>::new());
        assert_eq!(self.model.open_queues(), 0);
    }
}

/// A copy of a link.
fn descriptor(
    source: u64,
    target: u64,
    completion: &Arc<Completion>,
    is_ordered: bool,
) -> Descriptor {
    // SAFETY: memory of the rig, which outlives the channel, or memory that is not accessible; the
    // completion has only this descriptor.
    let copy = unsafe {
        Descriptor::new(Opcode::Copy, source, target, LINK_BYTES as u64)
            .completes(completion.clone())
    };
    if is_ordered { copy.ordered() } else { copy }
}

/// The faults of a chain.
fn page_fault(number: u64) -> DsaFaults {
    DsaFaults { page_faults: FaultSchedule::At(number), ..DsaFaults::default() }
}

#[test]
fn a_chain_is_one_batch_and_one_doorbell_in_whatever_order_the_device_executes() {
    let rig = ChainRig::new(IdxdModelOptions::default());
    let fences = LINKS as u64 - 1;
    assert_eq!(rig.run_with(|_| DsaFaults::default(), 8), [8, 8 * fences, 0, 0]);
    rig.assert_clean();
}

#[test]
fn links_behind_a_page_fault_are_submitted_again_together_after_it_is_resolved() {
    let rig = ChainRig::new(IdxdModelOptions::default());
    let links = LINKS as u64;
    for faulting in 1..=links {
        let [doorbells, _, abandoned, failed] = rig.run_with(|_| page_fault(faulting), 2);
        assert_eq!((abandoned, failed), (2 * (links - faulting), 0), "link {faulting}");
        // The chain, the rest of the link, and what is behind it.
        let expected = if faulting < links { 3 } else { 2 };
        assert_eq!(doorbells, 2 * expected, "link {faulting}");
    }
    let every = DsaFaults { page_faults: FaultSchedule::Every(2), ..DsaFaults::default() };
    let [_, _, abandoned, failed] = rig.run_with(|_| every, 4);
    assert!(abandoned > 0 && failed == 0);
    rig.assert_clean();
}

#[test]
fn links_behind_a_failure_are_left_to_the_processor_which_works_in_order() {
    let rig = ChainRig::new(IdxdModelOptions::default());
    let links = LINKS as u64;
    for failing in 1..=links {
        let errors = FaultSchedule::At(failing);
        let faults = DsaFaults { errors, ..DsaFaults::default() };
        let [_, _, abandoned, failed] = rig.run_with(|_| faults, 2);
        assert_eq!((abandoned, failed), (2 * (links - failing), 2 * (links - failing + 1)));
    }
    // The next chain is the device's again.
    assert_eq!(rig.run_with(|_| DsaFaults::default(), 1)[3], 0);
    rig.assert_clean();
}

#[test]
fn a_chain_survives_lost_records_lost_lists_and_stops() {
    for number in 1..=LINKS as u64 + 1 {
        let at = FaultSchedule::At(number);
        for faults in [
            DsaFaults { loses_records: at, ..DsaFaults::default() },
            DsaFaults { halts: at, ..DsaFaults::default() },
            DsaFaults { stalls: at, ..DsaFaults::default() },
            DsaFaults { list_faults: FaultSchedule::At(1), ..page_fault(number) },
            DsaFaults { list_faults: FaultSchedule::At(2), ..page_fault(number) },
            DsaFaults { errors: FaultSchedule::At(number + 1), ..page_fault(number) },
            DsaFaults { refuses_submissions: FaultSchedule::Every(2), ..page_fault(number) },
        ] {
            // A queue that stops twice in a row is not used any more.
            let rig = ChainRig::new(IdxdModelOptions::default());
            let patience = Some(Duration::from_millis(30));
            rig.run_with(|_| DsaFaults { patience, ..faults }, 1);
            rig.assert_clean();
        }
    }
}

#[test]
fn what_is_ordered_after_bad_memory_does_not_start_and_what_is_only_behind_it_does() {
    let rig = ChainRig::new(IdxdModelOptions::default());
    let nowhere = ReservedRange::new(page_bytes()).unwrap();
    let address = nowhere.address() as u64;
    for bad in 0..LINKS {
        let (mut descriptors, RunningChain(completions)) = rig.chain(5000);
        let replaced = descriptors.remove(bad);
        // It fails, and its successor would read what it has not written.
        let (target, after) = (rig.slot(bad), &completions[..bad]);
        let completion = Arc::new(Completion::whole().ordered_after(after.last().cloned()));
        drop(replaced);
        let (mut all, mut previous) = (completions[..bad].to_vec(), completion.clone());
        all.push(completion.clone());
        descriptors.truncate(bad);
        descriptors.push(descriptor(address, target, &completion, bad > 0));
        for link in bad + 1..LINKS {
            let next = Arc::new(Completion::whole().ordered_after([previous]));
            descriptors.push(descriptor(rig.slot(link - 1), rig.slot(link), &next, true));
            all.push(next.clone());
            previous = next;
        }
        let other = Arc::new(Completion::whole().ordered_after([Arc::new(Completion::done())]));
        let source = rig.rig.source.as_ptr() as u64;
        descriptors.push(descriptor(source, rig.slot(LINKS), &other, true));
        let before = rig.rig.target.as_slice()[(bad + 1) * LINK_BYTES..LINKS * LINK_BYTES].to_vec();
        rig.rig.submit(descriptors);
        rig.rig.finish();
        for (link, completion) in all.iter().enumerate() {
            let outcome = completion.outcome().expect("it is complete").map(|_| ());
            let expected = match link.cmp(&bad) {
                std::cmp::Ordering::Less => Ok(()),
                std::cmp::Ordering::Equal => {
                    Err(ExecutionError::BadMemory { address, done_bytes: 0 })
                }
                std::cmp::Ordering::Greater => Err(ExecutionError::Predecessor),
            };
            assert_eq!(outcome, expected, "link {link}, bad is {bad}");
        }
        let target = rig.rig.target.as_slice();
        assert!(target[(bad + 1) * LINK_BYTES..LINKS * LINK_BYTES] == before, "not written");
        assert!(matches!(other.outcome(), Some(Ok(_))));
        assert!(
            target[LINKS * LINK_BYTES..(LINKS + 1) * LINK_BYTES]
                == rig.rig.source.as_slice()[..LINK_BYTES]
        );
    }
    rig.assert_clean();
}

#[test]
fn one_that_is_not_ordered_is_submitted_again_without_those_that_wait_for_a_failed_one() {
    let rig = ChainRig::new(IdxdModelOptions::default());
    let nowhere = ReservedRange::new(page_bytes()).unwrap();
    let (address, source) = (nowhere.address() as u64, rig.rig.source.as_ptr() as u64);
    for round in 0..8 {
        let new = |after: &[&Arc<Completion>]| {
            Arc::new(Completion::whole().ordered_after(after.iter().map(|&one| one.clone())))
        };
        let (bad, free) = (new(&[]), new(&[]));
        let second = new(&[&bad]);
        let last = new(&[&second, &free]);
        let before = rig.rig.target.as_slice()[2 * LINK_BYTES..3 * LINK_BYTES].to_vec();
        rig.rig.submit(vec![
            descriptor(address, rig.slot(0), &bad, false),
            descriptor(rig.slot(0), rig.slot(1), &second, true),
            descriptor(source + 100 * round, rig.slot(3), &free, false),
            descriptor(rig.slot(1), rig.slot(2), &last, true),
        ]);
        rig.rig.finish();
        let outcome = |one: &Arc<Completion>| one.outcome().expect("it is complete").map(|_| ());
        let expected = ExecutionError::BadMemory { address, done_bytes: 0 };
        assert_eq!(outcome(&bad), Err(expected));
        assert_eq!(outcome(&second), Err(ExecutionError::Predecessor));
        assert_eq!(outcome(&free), Ok(()));
        assert_eq!(outcome(&last), Err(ExecutionError::Predecessor));
        let target = rig.rig.target.as_slice();
        assert!(target[2 * LINK_BYTES..3 * LINK_BYTES] == before, "not written");
        let copied = &rig.rig.source.as_slice()[100 * round as usize..][..LINK_BYTES];
        assert!(target[3 * LINK_BYTES..4 * LINK_BYTES] == *copied);
    }
    rig.assert_clean();
}

#[test]
fn an_ordered_copy_waits_for_one_of_an_earlier_batch() {
    let rig = ChainRig::new(IdxdModelOptions::default());
    let delay = std::time::Duration::from_millis(2);
    rig.device().set_faults(DsaFaults { delay, ..DsaFaults::default() });
    for round in 1..20 {
        let (descriptors, _) = rig.chain(100 * round);
        // Every link by itself: all but the first wait in the ring.
        descriptors.into_iter().for_each(|link| rig.rig.submit(vec![link]));
        rig.rig.finish();
        let expected = &rig.rig.source.as_slice()[100 * round..][..LINK_BYTES];
        let last = &rig.rig.target.as_slice()[(LINKS - 1) * LINK_BYTES..][..LINK_BYTES];
        assert!(last == expected);
    }
    assert_eq!(rig.rig.channel.statistics().failed, 0);
    rig.assert_clean();
}

#[test]
fn a_queue_without_batches_orders_copies_by_their_ends() {
    let rig = ChainRig::new(IdxdModelOptions { may_map: false, ..IdxdModelOptions::default() });
    let links = LINKS as u64;
    assert_eq!(rig.run_with(|_| DsaFaults::default(), 4), [4 * links, 0, 0, 0]);
    assert_eq!(rig.run_with(page_fault, 3)[3], 0);
    rig.assert_clean();
}
