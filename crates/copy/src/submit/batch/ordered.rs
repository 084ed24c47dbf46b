//! Ordered items of a batch, which start when all items before them are complete.
//!
//! An engine that orders descriptors gets an ordered item in one run with the items that it waits for,
//! and keeps the order itself. Otherwise the item starts a new run, or is executed on its own, when those
//! are complete, as any transfer that is ordered after others.

use std::ops::Range;
use std::sync::Arc;

use memferry_engine::Opcode;
use memferry_engine::contract::DescriptorLeases;

use super::{CompletionRun, EachBatch, pins_of};
use crate::plan::{self, CopyPlan, CopyStrategy};
use crate::request::{Options, Request};
use crate::transfer::{Dependency, Transfer};

/// A planned item of a run for an engine that orders descriptors.
struct OrderedItem<'a> {
    request: &'a Request<'static>,
    plan: &'a CopyPlan,
    engine: usize,
    chunk_bytes: u64,
    pins: Option<Arc<DescriptorLeases>>,
}

/// The ranges of memory that an item accesses: what it writes first.
pub(super) fn operands(request: &Request<'_>) -> [Range<u64>; 2] {
    let Request { operation, source, target, length, .. } = *request;
    let source = if operation == Opcode::Fill { target } else { source };
    [target..target + length, source..source + length]
}

impl CompletionRun {
    /// Whether the run has every item from `first` to the one before `next`.
    fn has_all(&self, first: usize, next: usize) -> bool {
        self.first_item <= first && self.first_item + self.completions.len() == next
    }

    /// Whether an item of the run accesses memory that `request` writes. An engine that does not know
    /// whether a descriptor was executed repeats it, perhaps after those that are ordered after it.
    fn accesses_target_of(&self, request: &Request<'_>) -> bool {
        let [written, _] = operands(request);
        self.operands.iter().any(|used| used.start < written.end && written.start < used.end)
    }
}

impl EachBatch<'_> {
    /// Adds the next item, which starts when all items before it are complete, and does not start if
    /// one of them fails.
    ///
    /// # Safety
    /// As for [`EachBatch::add`].
    pub(super) unsafe fn add_ordered(&mut self, request: Request<'static>) {
        let item = self.transfers.len();
        let core = self.core;
        match core.plan(&request, false) {
            Ok(plan) => {
                // SAFETY: the caller upholds the contract.
                let is_in_run = unsafe { self.add_to_run(&request, &plan) };
                if !is_in_run {
                    self.submit_completions();
                    self.submit_sequences();
                    let before = self.transfers[self.group_start..].iter();
                    let after = before.filter(|transfer| !transfer.has_succeeded());
                    let options = after.fold(Options::new(), Options::after);
                    let request = request.with(options);
                    let plan = core.in_window(plan, &request);
                    // SAFETY: the caller upholds the contract.
                    self.transfers.push(unsafe { core.execute(request, &plan, false) });
                }
            }
            Err(_) => {
                // It does not happen: a processor executes everything that a batch has.
                self.submit_completions();
                self.submit_sequences();
                self.transfers.iter().for_each(|transfer| drop(transfer.wait()));
                // SAFETY: the caller upholds the contract.
                self.transfers.push(unsafe { super::copy_inline(&request) });
            }
        }
        self.group_start = item;
    }

    /// Adds an ordered item to a run, if its engine orders descriptors; returns whether it does.
    ///
    /// # Safety
    /// As for [`EachBatch::add`].
    unsafe fn add_to_run(&mut self, request: &Request<'static>, plan: &CopyPlan) -> bool {
        let CopyStrategy::FixedParts { engine, chunk_bytes, .. } = plan.strategy else {
            return false;
        };
        let open = &self.core.engines[engine];
        let is_short = (1..=plan::SINGLE_DESCRIPTOR_BYTES).contains(&request.length);
        if !is_short || !open.engine.orders_descriptors() {
            return false;
        }
        let Some(pins) = pins_of(open, request) else { return false };
        let item = OrderedItem { request, plan, engine, chunk_bytes, pins };
        // SAFETY: the caller upholds the contract.
        unsafe { self.add_ordered_parts(&item) };
        true
    }

    /// Adds an ordered item to the run of the items that it waits for, or begins a new one with it.
    ///
    /// # Safety
    /// As for [`EachBatch::add`].
    unsafe fn add_ordered_parts(&mut self, item: &OrderedItem<'_>) {
        let (next, first) = (self.transfers.len(), self.group_start);
        let run = &self.completions;
        let mut predecessors = Vec::new();
        if run.engine == item.engine
            && run.has_all(first, next)
            && !run.accesses_target_of(item.request)
        {
            predecessors.extend_from_slice(&run.completions[first - run.first_item..]);
        } else {
            self.submit_completions();
            self.submit_sequences();
            let before = self.transfers[first..].iter();
            let after = before.filter(|transfer| !transfer.has_succeeded());
            self.completions.after = after.map(|transfer| transfer.predecessor().0).collect();
        }
        let &OrderedItem { request, plan, engine, chunk_bytes, ref pins } = item;
        // SAFETY: the caller upholds the contract.
        unsafe {
            self.add_parts(engine, request, plan, chunk_bytes, pins.as_ref(), predecessors);
        }
    }
}

impl Transfer {
    /// Whether it is known to have succeeded.
    fn has_succeeded(&self) -> bool {
        matches!(self.outcome(), Some(Ok(_)))
    }
}
