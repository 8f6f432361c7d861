"""One reader a format. Each fills a Report, or raises Unreadable where nothing can be said of the contents."""
