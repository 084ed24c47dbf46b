//! Memory that can be sent or received into: a slice, or several slices as one message.

use std::io::{IoSlice, IoSliceMut};

use bytemuck::Pod;

use crate::port::Peer;
use crate::segments::{Segment, Segments};

/// The peers from which a receive takes messages.
///
/// ```
/// use memferry::message::{Endpoint, Source, TAG_ANY};
///
/// let endpoint = Endpoint::open("doc-source")?;
/// assert!(endpoint.iprobe(Source::Any, 0, TAG_ANY)?.is_none());
/// let own: Source = endpoint.self_peer()?.into();
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// Any peer. Such a receive stays pending when the last peer disconnects, because another may
    /// connect.
    Any,
    /// One peer.
    Peer(Peer),
}

impl Source {
    pub(crate) fn peer(self) -> Option<Peer> {
        match self {
            Self::Any => None,
            Self::Peer(peer) => Some(peer),
        }
    }
}

impl From<Peer> for Source {
    fn from(peer: Peer) -> Self {
        Self::Peer(peer)
    }
}

/// The bytes of a slice of a plain type. A type without a size has none.
pub(crate) fn plain_bytes<T: Pod>(values: &[T]) -> &[u8] {
    bytemuck::try_cast_slice(values).unwrap_or_default()
}

/// The bytes of a slice of a plain type, for writing.
pub(crate) fn plain_bytes_mut<T: Pod>(values: &mut [T]) -> &mut [u8] {
    bytemuck::try_cast_slice_mut(values).unwrap_or_default()
}

/// Seals the traits: only types that this crate knows to be valid memory implement them.
mod sealed {
    pub trait Memory {}
    impl Memory for &[u8] {}
    impl Memory for &Vec<u8> {}
    impl<const N: usize> Memory for &[u8; N] {}
    impl Memory for &[std::io::IoSlice<'_>] {}
    impl Memory for &mut [u8] {}
    impl Memory for &mut Vec<u8> {}
    impl<const N: usize> Memory for &mut [u8; N] {}
    impl Memory for &mut [std::io::IoSliceMut<'_>] {}
}

/// Memory that can be sent: a slice of bytes, or a list of slices. Slices of other plain types have
/// calls of their own ([`Endpoint::send_slice`](crate::Endpoint::send_slice)): if they were taken here,
/// `[0; 8]` would no longer mean eight bytes.
///
/// ```
/// use std::io::IoSlice;
///
/// use memferry::message::{Endpoint, Error, Peer};
///
/// fn header_and_body(endpoint: &Endpoint, to: Peer, body: &[u8]) -> Result<(), Error> {
///     endpoint.send(to, 1, &[IoSlice::new(b"head"), IoSlice::new(body)][..])
/// }
/// ```
pub trait IntoSegments<'a>: sealed::Memory {
    /// Returns the segments.
    fn into_segments(self) -> Segments;
}

/// Memory that can be received into: a slice of bytes, or a list of slices. For slices of other plain
/// types see [`Endpoint::recv_slice`](crate::Endpoint::recv_slice).
///
/// ```
/// use std::io::IoSliceMut;
///
/// use memferry::message::{Endpoint, Error, Source, TAG_ALL};
///
/// fn header_and_body(endpoint: &Endpoint, head: &mut [u8; 4], body: &mut [u8]) -> Result<(), Error> {
///     let mut parts = [IoSliceMut::new(head), IoSliceMut::new(body)];
///     endpoint.recv(Source::Any, 1, TAG_ALL, &mut parts[..]).map(|_| ())
/// }
/// ```
pub trait IntoSegmentsMut<'a>: sealed::Memory {
    /// Returns the segments.
    fn into_segments_mut(self) -> Segments;
}

impl<'a> IntoSegments<'a> for &'a [u8] {
    fn into_segments(self) -> Segments {
        Segments::One(Segment::source(self.as_ptr(), self.len()))
    }
}

impl<'a> IntoSegments<'a> for &'a Vec<u8> {
    fn into_segments(self) -> Segments {
        self.as_slice().into_segments()
    }
}

impl<'a, const N: usize> IntoSegments<'a> for &'a [u8; N] {
    fn into_segments(self) -> Segments {
        self.as_slice().into_segments()
    }
}

impl<'a> IntoSegments<'a> for &[IoSlice<'a>] {
    fn into_segments(self) -> Segments {
        let segments: Vec<_> = self.iter().map(|s| Segment::source(s.as_ptr(), s.len())).collect();
        Segments::new(&segments)
    }
}

impl<'a> IntoSegmentsMut<'a> for &'a mut [u8] {
    fn into_segments_mut(self) -> Segments {
        Segments::One(Segment::target(self.as_mut_ptr(), self.len()))
    }
}

impl<'a> IntoSegmentsMut<'a> for &'a mut Vec<u8> {
    fn into_segments_mut(self) -> Segments {
        self.as_mut_slice().into_segments_mut()
    }
}

impl<'a, const N: usize> IntoSegmentsMut<'a> for &'a mut [u8; N] {
    fn into_segments_mut(self) -> Segments {
        self.as_mut_slice().into_segments_mut()
    }
}

impl<'a> IntoSegmentsMut<'a> for &'a mut [IoSliceMut<'_>] {
    fn into_segments_mut(self) -> Segments {
        let segment = |s: &mut IoSliceMut<'_>| Segment::target(s.as_mut_ptr(), s.len());
        let segments: Vec<_> = self.iter_mut().map(segment).collect();
        Segments::new(&segments)
    }
}
