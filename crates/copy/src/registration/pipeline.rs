//! Pipelined pinning of a long transfer, so that the engine copies the first bytes while later
//! pages are still being pinned.
//!
//! Source and targets are pinned independently, each in ranges that end at a page boundary:
//! otherwise the ranges of a copy between differently aligned addresses would share pages, and the
//! cache would pin these repeatedly. Successive ranges grow, and a range that the cache contains in
//! a larger one extends to the end of that one.

use std::sync::Arc;

use memferry_engine::completion::ChannelBatch;
use memferry_engine::contract::{Channel, DescriptorLeases};
use memferry_engine::{MemoryKind, Opcode};
use memferry_memory::pin_cache::Lease;
use memferry_memory::pinning::{Access, PageRange};
use memferry_memory::registration::RegistrationError;
use memferry_sys::pages::page_bytes;

use super::EngineRegistrations;
use crate::parts::PartBuilder;

/// Up to this number of pages, pinning everything takes no longer than pinning the first range.
const SINGLE_PIN_PAGES: usize = 8;

/// Whether memory of this length is pinned as one range.
pub(crate) fn is_pinned_at_once(length: u64) -> bool {
    length <= (SINGLE_PIN_PAGES * page_bytes()) as u64
}

/// Maximum number of pages of a pinned range.
const MAX_PIN_PAGES: usize = 1024;

/// Iterator over the batches of a transfer in parts. Each step pins the memory of one batch and
/// claims its chunk. A caller that submits each batch before the next step lets the engine copy
/// meanwhile.
#[derive(Debug)]
pub(crate) struct PipelinedRegistration<'a> {
    registrations: &'a EngineRegistrations,
    parts: PartBuilder<'a>,
    channel: Arc<dyn Channel>,
    auto_progress: bool,
    source: RegistrationCursor,
    target: RegistrationCursor,
    /// The second target of a dualcast; no other operation needs it.
    second: RegistrationCursor,
    /// The lease of the notification variable.
    variable: Option<Arc<Lease>>,
    /// The offset of the next batch, and the end of the chunk that is claimed for it.
    at: u64,
    claimed: u64,
}

impl<'a> PipelinedRegistration<'a> {
    /// # Safety
    /// As for [`Ferry::start_raw`](crate::Ferry::start_raw), for the batches; no other thread may
    /// claim chunks until the iterator is exhausted.
    pub(crate) unsafe fn new(
        registration: &'a EngineRegistrations,
        cut: PartBuilder<'a>,
        channel: Arc<dyn Channel>,
        variable: Option<Arc<Lease>>,
    ) -> Self {
        let request = cut.request;
        let needed = |kind, access: Option<Access>| access.filter(|_| kind == MemoryKind::Host);
        let source = needed(request.source_memory, request.operation.source_access());
        let target = needed(request.target_memory, request.operation.target_access());
        let second = target.filter(|_| request.operation == Opcode::Dualcast);
        Self {
            registrations: registration,
            parts: cut,
            channel,
            auto_progress: cut.capabilities.auto_progress,
            source: RegistrationCursor::new(request.source, request.length, source),
            target: RegistrationCursor::new(request.target, request.length, target),
            second: RegistrationCursor::new(request.second, request.length, second),
            variable,
            at: 0,
            claimed: 0,
        }
    }

    /// Pins the next range of all sides; returns the offset up to which all are pinned. Where pages
    /// do not limit a descriptor, ranges are as long as chunks, so that they do not limit it either.
    fn pin(&mut self) -> Result<u64, RegistrationError> {
        let has_long_parts = self.parts.capabilities.boundary_bytes.is_none();
        let wanted = if has_long_parts { self.claimed } else { self.at };
        let missing = (self.source.missing(self.at, wanted), self.target.missing(self.at, wanted));
        if let (Some(source), Some(target)) = missing
            && let Some([source, target]) = self.registrations.cache().find_both([source, target])
        {
            self.source.hold(source);
            self.target.hold(target);
        }
        let source = self.source.pin_up_to(self.at, wanted, self.registrations)?;
        let target = self.target.pin_up_to(self.at, wanted, self.registrations)?;
        let second = self.second.pin_up_to(self.at, wanted, self.registrations)?;
        Ok(source.min(target).min(second))
    }
}

impl Iterator for PipelinedRegistration<'_> {
    type Item = ChannelBatch;

    fn next(&mut self) -> Option<ChannelBatch> {
        if self.at == self.claimed {
            let work = self.parts.completion.work().expect("parts belong to chunked work");
            let chunk = work.claim_front()?;
            (self.at, self.claimed) = (chunk.offset, chunk.offset + chunk.length);
        }
        let (from, pinned) = (self.at, self.pin());
        match pinned {
            Ok(pinned) => {
                self.at = pinned.min(self.claimed);
                assert!(self.at > from, "a pinned piece has bytes");
                let variable = self.variable.clone();
                let pins = DescriptorLeases {
                    source: self.source.lease(),
                    target: self.target.lease(),
                    second: self.second.lease(),
                    variable,
                };
                let mut parts = Vec::new();
                // SAFETY: the caller of `new` upholds the contract; the range lies in the claimed
                // chunk, and `at` is past it.
                unsafe { self.parts.extend(&mut parts, from..self.at, Some(&Arc::new(pins))) };
                Some(ChannelBatch::many(self.channel.clone(), self.auto_progress, parts))
            }
            Err(unpinned) => {
                // The processor gets the rest of the chunk, so that a pinner which rejects
                // everything is not called for every page.
                self.at = self.claimed;
                // SAFETY: as above.
                let part = unsafe { self.parts.part(from, self.claimed - from) };
                Some(self.registrations.unpinned_batch(part, unpinned))
            }
        }
    }
}

/// The source or the target of a transfer, and how far it is pinned.
#[derive(Debug)]
struct RegistrationCursor {
    address: u64,
    length: u64,
    /// `None` if this side needs no pin.
    access: Option<Access>,
    /// The lease of the bytes before `ready`, as far as they are not yet submitted.
    lease: Option<Arc<Lease>>,
    ready: u64,
    next_pages: usize,
}

impl RegistrationCursor {
    fn new(address: u64, length: u64, access: Option<Access>) -> Self {
        let next_pages = if is_pinned_at_once(length) { SINGLE_PIN_PAGES + 1 } else { 1 };
        Self { address, length, access, lease: None, ready: 0, next_pages }
    }

    fn lease(&self) -> Option<Arc<Lease>> {
        self.lease.clone()
    }

    /// Ensures that the byte at `offset` is pinned, with a range up to `wanted` if it is not. Returns
    /// the end of the pinned range that contains it.
    fn pin_up_to(
        &mut self,
        offset: u64,
        wanted: u64,
        registration: &EngineRegistrations,
    ) -> Result<u64, RegistrationError> {
        if self.access.is_none() {
            return Ok(self.length);
        }
        if let Some((start, length, access)) = self.missing(offset, wanted) {
            self.lease = None;
            let lease = match registration.pin(start, length, access) {
                // The memory before an unmapped page can be pinned without it.
                Err(RegistrationError::Unmapped { address }) if address > start => {
                    registration.pin(start, address - start, access)?
                }
                outcome => outcome?,
            };
            self.hold(lease);
        }
        Ok(self.ready)
    }

    /// The next range to be pinned, with the access, if the byte at `offset` is not pinned.
    fn missing(&self, offset: u64, wanted: u64) -> Option<(u64, u64, Access)> {
        let access = self.access.filter(|_| self.lease.is_none() || offset >= self.ready)?;
        let end = self.pin_end(offset).max(wanted);
        Some((self.address + offset, end - offset, access))
    }

    /// Keeps the lease of the next range.
    fn hold(&mut self, lease: Lease) {
        self.ready = (lease.range().end() as u64 - self.address).min(self.length);
        self.next_pages = (2 * self.next_pages).min(MAX_PIN_PAGES);
        self.lease = Some(Arc::new(lease));
    }

    /// Returns the end of the next range.
    fn pin_end(&self, offset: u64) -> u64 {
        let (start, length) = (self.address + offset, self.length - offset);
        // The pinner rejects what is no valid range of pages.
        let Ok(rest) = PageRange::covering(start as usize, length as usize) else {
            return self.length;
        };
        let (chunk, _) = rest.split(self.next_pages);
        (chunk.end() as u64 - self.address).min(self.length)
    }
}
