//! Allocator shared by all fuzz targets: a single huge allocation aborts the process.
//!
//! An input has at most some kilobytes (libFuzzer's `-max_len`). Code that asks for much more
//! memory at once trusted a length in the input.

use std::alloc::{GlobalAlloc, Layout, System};

/// Largest single allocation allowed. No input of a few kilobytes needs more.
const MAX_BYTES: usize = 16 << 20;

/// The system's allocator, except that an allocation above `MAX_BYTES` aborts the process.
struct Bounded;

#[global_allocator]
static BOUNDED: Bounded = Bounded;

fn check(bytes: usize) {
    if bytes > MAX_BYTES {
        // Abort instead of a panic: a panic allocates memory, and a decoder could catch it.
        std::process::abort();
    }
}

// SAFETY: each call is passed unchanged to the system's allocator.
unsafe impl GlobalAlloc for Bounded {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        check(layout.size());
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        check(layout.size());
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        check(bytes);
        unsafe { System.realloc(memory, layout, bytes) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        unsafe { System.dealloc(memory, layout) }
    }
}
