//! The state of the model: its memory, registrations and events.

use std::collections::{BTreeMap, HashMap};

use memferry_sys::Pages;
use memferry_sys::cuda::{DriverError, MemcpyKind, code};
use memferry_sys::pages::ReservedRange;

use super::{CudaModelStats, error};

#[derive(Debug, Default)]
pub(super) struct CudaModelState {
    /// Device memory, by its address, which no processor can access.
    pub(super) allocations: BTreeMap<u64, Allocation>,
    pub(super) pinned: HashMap<u64, Pages>,
    /// Registered memory: start address, end, and whether it is writable.
    pub(super) registered: BTreeMap<usize, (usize, bool)>,
    /// Host memory that copies in flight use.
    pub(super) in_flight: Vec<(usize, usize)>,
    /// Device memory that copies in flight use, by the address of its contents.
    pub(super) in_flight_inside: Vec<(u64, u64)>,
    /// The number of records of each event, and the number reached.
    pub(super) events: HashMap<u64, (u64, u64)>,
    /// The number of copies that started, and its limit.
    pub(super) copies_started: u64,
    pub(super) max_copies: Option<u64>,
    pub(super) registration_calls: u64,
    pub(super) copy_calls: u64,
    pub(super) last_id: u64,
    pub(super) stats: CudaModelStats,
}

#[derive(Debug)]
pub(super) struct Allocation {
    pub(super) bytes: usize,
    /// Reserves the addresses without access.
    pub(super) _addresses: ReservedRange,
    pub(super) contents: Pages,
}

impl CudaModelState {
    pub(super) fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    /// The contents of device memory.
    pub(super) fn contents(&mut self, address: u64, length: usize) -> Option<(&mut Pages, usize)> {
        let (start, allocation) = self.allocations.range_mut(..=address).next_back()?;
        let at = (address - start) as usize;
        (at + length <= allocation.bytes).then_some((&mut allocation.contents, at))
    }

    pub(super) fn model_address(
        &mut self,
        address: u64,
        length: usize,
    ) -> Result<u64, DriverError> {
        let contents = self.contents(address, length);
        let (contents, at) = contents.ok_or(error("device memory", code::INVALID_VALUE))?;
        Ok(contents.as_ptr() as u64 + at as u64)
    }

    /// The addresses of both sides of a copy in this process.
    pub(super) fn model_addresses(
        &mut self,
        kind: MemcpyKind,
        mut source: u64,
        mut target: u64,
        length: usize,
    ) -> Result<(u64, u64), DriverError> {
        if kind != MemcpyKind::HostToDevice {
            source = self.model_address(source, length)?;
        }
        if kind != MemcpyKind::DeviceToHost {
            target = self.model_address(target, length)?;
        }
        Ok((source, target))
    }

    /// Whether host memory lies inside one registration that allows the access.
    pub(super) fn is_registered(&self, address: u64, length: usize, writes: bool) -> bool {
        let end = address as usize + length;
        let registered = self.registered.range(..=address as usize).next_back();
        let pinned = self.pinned.values().any(|pages| {
            let start = pages.as_ptr() as usize;
            start <= address as usize && end <= start + pages.len()
        });
        pinned
            || registered.is_some_and(|(_, (to, may_write))| end <= *to && (*may_write || !writes))
    }

    /// Whether the range overlaps a registration and does not lie inside one.
    pub(super) fn crosses_registration(&self, address: u64, length: usize) -> bool {
        let (start, end) = (address as usize, address as usize + length);
        self.overlaps_registered(start, end) && !self.is_registered(address, length, false)
    }

    pub(super) fn overlaps_registered(&self, start: usize, end: usize) -> bool {
        let before = self.registered.range(..end).next_back();
        before.is_some_and(|(_, (to, _))| *to > start)
    }
}
