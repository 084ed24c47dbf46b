//! What can be sent and received into: a slice, or several as one message.

use std::io::{IoSlice, IoSliceMut};

use crate::pieces::{Piece, Pieces};
use crate::port::Peer;

/// From whom a receive takes messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// From anybody. Such a receive stays under way when the last peer is gone: another may come.
    Any,
    /// From one peer.
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

/// Only what this crate knows to be valid memory may call itself that.
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

/// Memory that can be sent: a slice, or a list of slices.
pub trait IntoPieces<'a>: sealed::Memory {
    /// Its pieces.
    fn into_pieces(self) -> Pieces;
}

/// Memory that can be received into: a slice, or a list of slices.
pub trait IntoPiecesMut<'a>: sealed::Memory {
    /// Its pieces.
    fn into_pieces_mut(self) -> Pieces;
}

impl<'a> IntoPieces<'a> for &'a [u8] {
    fn into_pieces(self) -> Pieces {
        Pieces::One(Piece::source(self.as_ptr(), self.len()))
    }
}

impl<'a> IntoPieces<'a> for &'a Vec<u8> {
    fn into_pieces(self) -> Pieces {
        self.as_slice().into_pieces()
    }
}

impl<'a, const N: usize> IntoPieces<'a> for &'a [u8; N] {
    fn into_pieces(self) -> Pieces {
        self.as_slice().into_pieces()
    }
}

impl<'a> IntoPieces<'a> for &[IoSlice<'a>] {
    fn into_pieces(self) -> Pieces {
        let pieces: Vec<_> = self.iter().map(|s| Piece::source(s.as_ptr(), s.len())).collect();
        Pieces::new(&pieces)
    }
}

impl<'a> IntoPiecesMut<'a> for &'a mut [u8] {
    fn into_pieces_mut(self) -> Pieces {
        Pieces::One(Piece::target(self.as_mut_ptr(), self.len()))
    }
}

impl<'a> IntoPiecesMut<'a> for &'a mut Vec<u8> {
    fn into_pieces_mut(self) -> Pieces {
        self.as_mut_slice().into_pieces_mut()
    }
}

impl<'a, const N: usize> IntoPiecesMut<'a> for &'a mut [u8; N] {
    fn into_pieces_mut(self) -> Pieces {
        self.as_mut_slice().into_pieces_mut()
    }
}

impl<'a> IntoPiecesMut<'a> for &'a mut [IoSliceMut<'_>] {
    fn into_pieces_mut(self) -> Pieces {
        let piece = |s: &mut IoSliceMut<'_>| Piece::target(s.as_mut_ptr(), s.len());
        let pieces: Vec<_> = self.iter_mut().map(piece).collect();
        Pieces::new(&pieces)
    }
}
