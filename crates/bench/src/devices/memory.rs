//! Buffers for copies, and copies by devices while the caller only waits.

use std::sync::Arc;

use anyhow::ensure;
use memferry::engine::Engine;
use memferry::engine::cpu::ProfileSource;
use memferry::{EngineSelection, Ferry, Notification, Options, Request};
use memferry_sys::Pages;

/// Offset of the target relative to its page; the source is page-aligned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Alignment {
    /// Series of this alignment.
    pub(super) series: &'static str,
    /// Offset of the target in its first page. The source starts on a page boundary.
    pub(super) target_offset: usize,
}

/// Both sides start on a page boundary.
pub(super) const ALIGNED: Alignment =
    Alignment { series: "memferry, page-aligned", target_offset: 0 };
/// The target starts half a page after a page boundary.
pub(super) const HALF_APART: Alignment =
    Alignment { series: "memferry, 2 KiB apart", target_offset: 2048 };
/// The target starts one cache line after a page boundary.
pub(super) const LINE_APART: Alignment =
    Alignment { series: "memferry, 64 B apart", target_offset: 64 };
/// The target starts at an odd address.
pub(super) const ODD: Alignment = Alignment { series: "memferry, odd target", target_offset: 1 };

/// Capacity of the channel in descriptors: enough for the largest copy. The caller would execute
/// what a full channel rejects, and must not execute anything here.
const CAPACITY: usize = 1 << 14;

/// A ferry with one channel of one engine, which gets every copy.
pub(super) fn ferry_over(engine: Arc<dyn Engine>) -> anyhow::Result<Ferry> {
    // The built-in profile instead of a measured one: no decision here depends on the speed of the
    // processor.
    let ferry = Ferry::builder()
        .profile(ProfileSource::BuiltIn)
        .engine(engine, 1)
        .gpu(EngineSelection::Off)
        .ioat(EngineSelection::Off)
        .dsa(EngineSelection::Off)
        .nic(EngineSelection::Off)
        .capacity(CAPACITY)
        .inline_bytes(0)
        .build()?;
    Ok(ferry)
}

/// Memory with a pattern that contains no zeros.
pub(super) fn patterned(bytes: usize) -> anyhow::Result<Pages> {
    let mut pages = Pages::new(bytes)?;
    for (at, byte) in pages.as_mut_slice().iter_mut().enumerate() {
        *byte = (at as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes()[6] | 1;
    }
    Ok(pages)
}

/// A source with a pattern, a target, and a ferry over one engine between them.
pub(super) struct EngineFixture {
    // Dropped before the memory: closing the ferry ends everything that is in flight.
    pub(super) ferry: Ferry,
    source: Pages,
    target: Pages,
}

impl EngineFixture {
    /// Creates buffers for copies of up to `most_bytes`, by one channel of one engine.
    pub(super) fn new(engine: Arc<dyn Engine>, most_bytes: usize) -> anyhow::Result<Self> {
        let ferry = ferry_over(engine)?;
        let most_shift = 4096;
        let (source, target) = (patterned(most_bytes)?, Pages::new(most_bytes + most_shift)?);
        Ok(Self { ferry, source, target })
    }

    /// Copies, waits without assisting, and verifies the bytes.
    pub(super) fn copy(&mut self, bytes: usize, placing: Alignment) -> anyhow::Result<()> {
        self.verified(bytes, placing, |shore| shore.start(bytes, placing, Options::new()))
    }

    /// Copies with a notification after the data, and verifies the bytes.
    pub(super) fn copy_notified(&mut self, bytes: usize) -> anyhow::Result<()> {
        self.verified(bytes, ALIGNED, |shore| shore.copy_unverified(bytes, true))
    }

    /// Copies without the verification, which takes longer than the copy.
    pub(super) fn copy_unverified(
        &mut self,
        bytes: usize,
        is_notified: bool,
    ) -> anyhow::Result<()> {
        let variable = Notification::new(0);
        let options = match is_notified {
            true => Options::new().notify(&variable, 7),
            false => Options::new(),
        };
        self.start(bytes, ALIGNED, options)?;
        let is_told = variable.load() == 7;
        ensure!(is_told == is_notified, "a copy of {bytes} bytes ended without its notification");
        Ok(())
    }

    /// Checks the bytes of the last copy to the start of the target.
    pub(super) fn verify(&self, bytes: usize) -> anyhow::Result<()> {
        let (source, target) = (&self.source.as_slice()[..bytes], self.target.as_slice());
        ensure!(*source == target[..bytes], "a copy of {bytes} bytes came out wrong");
        Ok(())
    }

    /// Verifies the bytes after a copy.
    fn verified(
        &mut self,
        bytes: usize,
        placing: Alignment,
        copy: impl FnOnce(&mut Self) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        // The source contains no zeros, so bytes that were not copied are detected.
        let range = placing.target_offset..placing.target_offset + bytes;
        self.target.as_mut_slice()[range.clone()].fill(0);
        copy(self)?;
        let (source, target) = (&self.source.as_slice()[..bytes], self.target.as_slice());
        ensure!(*source == target[range], "a copy of {bytes} bytes came out wrong");
        Ok(())
    }

    fn start(&mut self, bytes: usize, to: Alignment, options: Options<'_>) -> anyhow::Result<()> {
        let target = &mut self.target.as_mut_slice()[to.target_offset..to.target_offset + bytes];
        let request = Request::copy(self.source.as_ptr(), target.as_mut_ptr(), bytes);
        // SAFETY: both sides belong to this value, and the call waits for the completion.
        unsafe { self.ferry.start_raw(request.with(options.no_caller_assist())) }?.wait()?;
        Ok(())
    }

    /// Delivers packets from separate buffers, as a network driver has them, into one target.
    pub(super) fn deliver(&mut self, packets: &Packets, count: usize) -> anyhow::Result<()> {
        let pieces: Vec<_> = (0..count).map(|number| packets.packet(number)).collect();
        let target = &mut self.target.as_mut_slice()[..count * Packets::BYTES];
        target.fill(0);
        let variable = Notification::new(0);
        // Without caller assist, so that the card delivers while the caller waits.
        let options = Options::new().notify(&variable, 9).no_caller_assist();
        self.ferry.deliver_with(&pieces, target, options)?;
        ensure!(variable.load() == 9, "{count} packets were delivered without a notification");
        ensure!(*target == pieces.concat(), "{count} packets were not delivered well");
        Ok(())
    }
}

/// Packets in a ring of buffers.
pub(super) struct Packets(Pages);

impl Packets {
    /// Payload of a full Ethernet frame with TCP/IP headers.
    pub(super) const BYTES: usize = 1460;
    const BUFFER_BYTES: usize = 2048;
    /// Offset of a packet in its buffer, after its headers.
    const HEADERS: usize = 64;

    pub(super) fn new(most: usize) -> anyhow::Result<Self> {
        let mut buffers = Pages::new(most * Self::BUFFER_BYTES)?;
        for (at, byte) in buffers.as_mut_slice().iter_mut().enumerate() {
            *byte = (at as u64).wrapping_mul(0xBF58_476D_1CE4_E5B9).to_le_bytes()[6] | 1;
        }
        Ok(Self(buffers))
    }

    fn packet(&self, number: usize) -> &[u8] {
        let start = number * Self::BUFFER_BYTES + Self::HEADERS;
        &self.0.as_slice()[start..start + Self::BYTES]
    }
}

#[cfg(test)]
mod tests {
    use memferry::engine::testing::polled::PolledEngine;

    use super::*;

    #[test]
    fn any_engine_serves_every_kind_of_copy() {
        let mut shore = EngineFixture::new(Arc::new(PolledEngine::new()), 1 << 16).unwrap();
        for placing in [ALIGNED, HALF_APART, LINE_APART, ODD] {
            for bytes in [1, 4096, 1 << 16] {
                shore.copy(bytes, placing).unwrap();
            }
        }
        shore.copy_notified(1 << 16).unwrap();
        shore.deliver(&Packets::new(40).unwrap(), 40).unwrap();
    }
}
