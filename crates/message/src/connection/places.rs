//! Memory as the two sides tell each other of it: described by one, found by the other.

use memferry_sys::shared_memory::Access;

use super::Wire;
use super::view::{self, Description, View};
use crate::pieces::Piece;
use crate::plan::Way;
use crate::region;
use crate::ring::cells::Nonsense;
use crate::wire::{Note, PIECE_BYTES, Place};

impl Wire {
    /// Describes memory of this side to the other, and shares regions that it lies in.
    /// `None` when the list of pieces finds no room now.
    pub(crate) fn describe(
        &mut self,
        pieces: &[Piece],
        access: Access,
    ) -> Result<Option<Place>, Nonsense> {
        if let [piece] = pieces {
            let region = self.region_of(piece, access);
            return Ok(Some(Place::Piece { address: piece.address as u64, region }));
        }
        let mut list = Vec::with_capacity(pieces.len() * PIECE_BYTES);
        for piece in pieces {
            let region = self.region_of(piece, access);
            list.extend((piece.address as u64).to_le_bytes());
            list.extend((piece.length as u64).to_le_bytes());
            list.extend(u64::from(region).to_le_bytes());
        }
        // Sharing may have taken the last cell.
        if !self.has_room()? {
            return Ok(None);
        }
        let Some(span) = self.give_out(list.len())? else { return Ok(None) };
        // SAFETY: the span is this side's until the cell that names it is written.
        unsafe { std::ptr::copy_nonoverlapping(list.as_ptr(), self.outgoing(span), list.len()) };
        Ok(Some(Place::List { list: span, count: pieces.len() as u32 }))
    }

    /// The number of the region that a piece lies in, shared with the other side; 0 for none.
    pub(super) fn region_of(&mut self, piece: &Piece, access: Access) -> u32 {
        if self.is_self() {
            return 0;
        }
        let Some(region) = region::find(piece.address, piece.length) else { return 0 };
        if self.exported.has(&region, access) {
            return region.number;
        }
        self.unshare_dropped();
        let share = |socket| self.exported.share(&region, access, socket);
        match self.socket.as_ref().and_then(share) {
            Some(note) => {
                self.post(note);
                region.number
            }
            None => 0,
        }
    }

    /// Tells the other side which regions are gone.
    pub(crate) fn unshare_dropped(&mut self) {
        for region in self.exported.take_dropped() {
            self.post(Note::Unshare { region });
        }
    }

    /// Maps a region that the other side has shared.
    pub(crate) fn import(
        &mut self,
        region: u32,
        access: Access,
        address: u64,
        length: u64,
    ) -> Result<(), Nonsense> {
        // Without it other paths are taken.
        let Some(descriptor) = self.take_descriptor(region)? else { return Ok(()) };
        self.imported
            .add(region, access, address, length, descriptor)
            .map_err(|_| Nonsense("a region that is not sealed or not as long as it says"))
    }

    /// Forgets a region of the other side.
    pub(crate) fn forget(&mut self, region: u32) {
        self.imported.remove(region);
    }

    /// Copies out what a note says about the memory of a message of `length` bytes. Must be done
    /// before the note is passed.
    pub(crate) fn read_place(
        &mut self,
        place: Place,
        length: u64,
    ) -> Result<Description, Nonsense> {
        let description = view::read(self, place, length)?;
        if let Place::List { list, .. } = place {
            self.used(list);
        }
        Ok(description)
    }

    /// The memory that the other side described, seen from here.
    pub(crate) fn view(&self, described: &Description, access: Access) -> (View, Way) {
        view::of(self, described, access)
    }

    /// How the other side will get at memory of this side, with what it has been given so far.
    pub(crate) fn their_way(&self, pieces: &[Piece], access: Access) -> Way {
        let mapped = |piece: &Piece| {
            region::find(piece.address, piece.length)
                .is_some_and(|region| self.exported.has(&region, access))
        };
        let (read, write) = self.their_reach;
        let crossing = if access == Access::Read { read } else { write };
        if self.is_self() || pieces.iter().all(mapped) {
            Way::Near
        } else if crossing {
            Way::Cross
        } else {
            Way::None
        }
    }
}
